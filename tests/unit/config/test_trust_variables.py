"""Environment variables of workers can load code, so those of a foreign configuration are refused and listed."""

from vlarl.config.trust import effects_of

SECTIONS = {"distributed": {"backend": "ray", "env_vars": {"LD_PRELOAD": "/tmp/theirs.so"}}}


def test_variables_of_workers_are_listed():
    (effect,) = effects_of(SECTIONS, given=())
    assert effect.startswith("distributed.env_vars: sets environment variables of workers, which can load code there")
    assert "LD_PRELOAD" in effect and "/tmp/theirs.so" in effect


def test_variables_that_the_user_has_given_are_not():
    assert list(effects_of(SECTIONS, given=("distributed.env_vars",))) == []
    assert list(effects_of({"distributed": {"backend": "local", "env_vars": {}}}, given=())) == []
