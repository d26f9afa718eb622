"""When a response gives the solution of its prompt."""

import pytest

from vlarl.solutions import find_solution, matches


@pytest.mark.parametrize(
    ("response", "solution", "match", "right"),
    [
        ("red", "Red", "exact", True),
        (" Red. ", "red", "exact", True),
        ("red or blue", "red", "exact", False),
        ("<think>blue?</think>\n<answer> red </answer>", "red", "exact", True),
        ("<answer>blue</answer> no, <answer>red</answer>", "<answer>red</answer>", "exact", True),
        (r"so it is \boxed{\frac{1}{2}}", r"$\frac{1}{2}$", "exact", True),
        ("", "red", "exact", False),
        ("The sum is 12.", "12", "number", True),
        ("12 minus 5 is 7", "12", "number", False),
        ("12-5", "5", "number", True),
        ("it is -5", "5", "number", False),
        ("1,250 apples", "#### 1250", "number", True),
        ("0.750", "3/4", "number", True),
        ("1e3", "1000.0", "number", True),
        ("twelve", "12", "number", False),
        ("12", "twelve", "number", False),
        ("1/0", "0", "number", False),
        ("(B)", "B", "choice", True),
        ("b", "B", "choice", True),
        ("The answer is C because A is wrong", "C", "choice", True),
        ("A. no\nB. yes\nSo the answer is (B).", "B", "choice", True),
        ("I would say red", "B", "choice", False),
        ("B", "no letter here", "choice", False),
    ],
)
def test_a_response_gives_the_solution_or_does_not(response, solution, match, right):
    assert matches(response, solution, match) is right


def test_the_solution_is_found_in_the_columns_of_trl_and_verl():
    assert find_solution({"solution": 4, "answer": 5}) == "4"
    assert find_solution({"solution": None, "answer": "5"}) == "5"
    assert find_solution({"reward_model": {"style": "rule", "ground_truth": "6"}}) == "6"
    assert find_solution({"extra_info": {"index": 3}}) is None
