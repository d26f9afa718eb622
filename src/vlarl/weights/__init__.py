"""Weight transfer from the learner to the engines."""
