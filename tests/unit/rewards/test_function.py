"""A user's own reward: what its module and its function may do, and what is said then."""

import threading

import pytest

from vlarl.errors import UsageError, VlarlError
from vlarl.rewards.base import RewardTimeoutError
from vlarl.rewards.function import FunctionReward

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(name, text): a module that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    return write


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ndef f(:\n", r"SyntaxError in broken_0.py, line 2: .*; correct it"),
        ("import numpy_of_mine\n", r"it needs the package 'numpy_of_mine', which is not installed.*install it"),
        ("\nx = 1 / 0\n", r"it raised ZeroDivisionError: division by zero \(broken_2.py, line 2\); correct it"),
        ("import sys\nsys.exit(3)\n", r"it called sys.exit\(3\) \(broken_3.py, line 2\); put .* under `if __name__ =="),
        ("raise ValueError('x' * 50_000_000)\n", r"raised ValueError: x+ … \(49,996,000 characters left out\)"),
        ("raise GeneratorExit('odd')\n", r"it raised GeneratorExit: odd \(broken_5.py, line 1\); correct it"),
        ("from math import nothing\n", r"it raised ImportError: cannot import name 'nothing'.*correct it"),
    ],
)
def test_a_module_that_can_not_be_imported_says_why_and_what_helps(module, text, says, request):
    name = f"broken_{request.node.callspec.indices['text']}"
    module(name, text)
    with pytest.raises(
        UsageError, match=rf"reward.source: cannot import the module '{name}' of '{name}:f': .*{says}"
    ) as e:
        FunctionReward(f"{name}:f")
    assert len(str(e.value)) < 6000
    assert "PYTHONPATH" not in str(e.value), "it was found"


def test_a_function_that_exits_is_a_failure_of_that_episode(module, trajectory):
    module("exits", "import sys\ndef f(trajectory):\n    sys.exit('enough')\n")
    with pytest.raises(VlarlError, match=r"exits:f called sys.exit\('enough'\); it must return a finite number"):
        FunctionReward("exits:f").score(trajectory([[1.0]]))


def test_a_function_that_raises_a_base_exception_is_a_failure_of_that_episode(module, trajectory):
    module("odd", "class Odd(BaseException):\n    pass\ndef f(trajectory):\n    raise Odd('enough')\n")
    with pytest.raises(VlarlError, match=r"odd:f raised Odd: enough; it must return a finite number"):
        FunctionReward("odd:f").score(trajectory([[1.0]]))


def test_an_interrupt_passes_a_reward(trajectory):
    def interrupted(trajectory):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FunctionReward("interrupted", interrupted).score(trajectory([[1.0]]))


def test_a_function_that_does_not_return_is_abandoned(module, trajectory):
    module("waits", "import threading\nGO = threading.Event()\ndef f(trajectory):\n    GO.wait()\n    return 1.0\n")
    reward = FunctionReward("waits:f", timeout_s=0.2)
    with pytest.raises(RewardTimeoutError, match=r"waits:f has not returned within reward.timeout_s = 0.2 s"):
        reward.score(trajectory([[1.0]]))
    __import__("waits").GO.set()
    reward.timeout_s = 30
    assert reward.score(trajectory([[1.0]])).env_return == 1.0


def test_a_timeout_of_the_functions_own_is_not_ours(module, trajectory):
    module("raises", "def f(trajectory):\n    raise TimeoutError('the judge is slow')\n")
    with pytest.raises(TimeoutError, match="the judge is slow"):
        FunctionReward("raises:f").score(trajectory([[1.0]]))


def test_calls_share_a_thread(module, trajectory):
    """So that what it keeps for a thread, such as a connection to a database, is there at the next call."""
    module("threads", "import threading\nSEEN = []\ndef f(t):\n    SEEN.append(threading.get_ident())\n    return 1\n")
    reward = FunctionReward("threads:f")
    for _ in range(2):
        reward.score(trajectory([[1.0]]))
    first, second = __import__("threads").SEEN
    assert first == second != threading.get_ident()
