"""Where a configuration comes from: defaults, presets, YAML files, flags and the names of other systems."""
