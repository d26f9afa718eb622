"""How fast the parts of a run are on this machine: the work behind `vlarl bench rollout|update|sync|iteration`."""
