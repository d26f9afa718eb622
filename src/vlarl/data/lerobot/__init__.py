"""LeRobot datasets, version 3.0, read and written without lerobot."""
