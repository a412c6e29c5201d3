"""common/answers.py: where the answer is, and whether two are one. Each test names the failure it pins."""

import json
import random
import time
import tracemalloc
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from common import answers
from common.answers import answers_match, extract_answer, read_gold
from common.rewards import accuracy_reward, format_reward
from testbed import GSM8K

# --- extraction ---


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7+5=12\n#### 12", "12"),
        ("####12", "12"),
        ("#### **12**", "12"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),  # an escaped brace does not close the box
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right"),
        (r"$\boxed 3$", "3"),
        (r"\fbox{3}", "3"),
        (r"\boxed{~12~}", "12"),
        (r"\boxed{12\ }", "12"),
        (r"\boxed{~12\ } 13", "12"),
        ("#### ~12~", "~12~"),  # Markdown, struck out
        ("<answer> 3 </answer>", "3"),
        (r"<answer>\boxed{3}</answer>", "3"),
        ("<answer>The answer is 3</answer>", "3"),
        ("The answer is $3$.", "3"),
        ("the final answer is: 3.", "3"),
        ("The final answer is 3. I hope it is correct. 4", "3"),
        ("The answer is 3.5. Bye", "3.5"),
        (r"The answer is $\frac12$.", r"\frac12"),
        (r"The answer is \(3\).", "3"),
        ("Answer: 3", "3"),
        ("ANSWER : 3", "3"),
        ("**Answer:** 3", "3"),
        ("**Answer**: 3", "3"),
        ("Answer: **3**", "3"),
        ("Answer:\n\n3\nbye", "3"),
        ("The answer is:\n$$\n3\n$$", "3"),
        ("答案是3", "3"),
        ("答案:3", "3"),
        ("答案\uff1a3。", "3"),
        ("**答案**\uff1a 3", "3"),
        ("Answer\uff1a3", "3"),
        ("【答案】12", "12"),
        ("【答案】：12。", "12"),
        ("【答案】B【解析】因为", "B"),
        ("答：12", "12"),
        ("**答**:12。", "12"),
        ("### Final Answer\n\n12\nbye", "12"),
        ("## **Answer**\n**12**", "12"),
        ("# The final answer \r\n12", "12"),
        ("#### Final Answer\n12", "12"),  # not "Final Answer"
        ("#### Answer: 12", "12"),
        ("### Final Answer\n" r"$$\boxed{12}$$", "12"),
        ("***Answer***: ***7***", "7"),
        ("***Answer:*** 7", "7"),
        ('The answer is "12".', "12"),
        ("The answer is \u201c12\u201d. Bye", "12"),
        ("Answer: '$12$'", "12"),
        ("\\boxed{\u2018a\u2019}", "a"),
        ("<ANSWER>12</ANSWER>", "12"),
        ("<Answer>12</answer>", "12"),
        ("Answer: 12</ANSWER>", "12"),
        (r"\boxed{12<|im_end|>}", "12"),
        ("<answer>12</s></ANSWER>", "12"),
        (r"\\boxed{\\frac{1}{2}}", r"\\frac{1}{2}"),
        (r"\boxed{3\boxed{4}}", r"3\boxed{4}"),  # the inner box is a part of an answer
        (r"\boxed{1} \boxed{x = \fbox{\boxed{4}}} {5}", r"x = \fbox{\boxed{4}}"),
        (r"\boxed{ is where it goes, {so \boxed{4}.", "4"),
        # a marker inside a complete box belongs to the box
        (r"\boxed{Answer: 42}", "42"),
        (r"\boxed{Answer: 42} is what I get.", "42"),
        (r"\boxed{The answer is 42. So 43}", "42"),
        (r"\boxed{\text{The answer is } 42}", "42"),
        (r"\boxed{\text{The answer is }" "\n42}", "42"),
        (r"\boxed{\text{The answer is 42.}}", "42"),
        (r"\boxed{\text{answer: 5}}", "5"),
        (r"\boxed{\text{answer: 5} \text{ cm}}", r"5  \text{ cm}"),
        (r"\boxed{\text{Answer: } \frac{1}{2}\ }", r"\frac{1}{2}"),
        (r"\boxed{\text{Answer: } 3 \text{ or } 4}", r"3 \text{ or } 4"),
        (r"\boxed{Answer: 3, Answer: 4}", "4"),
        (r"\boxed{Answer: 1} \boxed{2}", "2"),
        (r"\boxed{Answer: 1} Answer: 2", "2"),
        (r"\boxed{#### 3}", "3"),
        (r"\boxed{答案是3}", "3"),
        (r"\boxed{<answer>7</answer>}", "7"),
        (r"\boxed{Answer: 12<|im_end|>}", "12"),
        (r"\boxed{Answer: \boxed{42}}", "42"),
        (r"\boxed{Answer: \boxed{3\boxed{4}}}", r"3\boxed{4}"),
        (r"\boxed{\boxed{Answer: 42} cm}", "42"),
        (r"\boxed{3 \boxed 4}", r"3 \boxed 4"),
        (r"\boxed{42 Answer:}", "42 Answer:"),  # nothing behind the marker: the box has no other
        (r"\boxed{42 Answer:} is 43", "42 Answer:"),
        (r"\boxed{Answer: 42", "42"),  # the box is not complete, the marker in it is
        (r"\text{answer: 5}", "5"),
        # a box behind or inside another marker
        (r"The answer is $\boxed{7}$.", "7"),
        (r"The answer is $x = \boxed{7}$.", "7"),
        (r"The answer is $\boxed{7$.", None),
        (r"#### \boxed{3}", "3"),
        (r"#### $\boxed{3}$", "3"),
        (r"<answer>\boxed{\text{Answer: } 7}</answer>", "7"),
        (r"<answer>\boxed{7</answer>", None),
        # quotes and markers that look like those above and are not
        ('The answer is "3" or "4".', '"3" or "4"'),
        ('Answer: 5"', '5"'),
        ("解答：因为 2", None),
        ("回答：12", None),
        ("### Final Answer", None),
        ("### Final Answers\n12", None),
        ("### Final Answer 12\n13", None),
        ("### Why this answer\n12", None),
        ("<ANSWER>12", None),
        (r"\boxed{12<|im_end|> or 13}", None),  # what follows the token does not close the box
        ("#### 12<|im_end|>}", "12"),
        # the last one counts, of whatever kind
        (r"\boxed{1} #### 2", "2"),
        (r"#### 2" "\n" r"\boxed{1}", "1"),
        ("#### 1\nThe answer is 2\n<answer>3</answer>", "3"),
        (r"<answer>1</answer> \boxed{2} answer: 3", "3"),
        ("#### 3\n#### ", "3"),  # nothing behind the last one: not complete
        (r"The answer is 5 \boxed{4} Answer:", "4"),
        # an unfinished last box or tag is no answer
        (r"\boxed{3} or \boxed{4", None),
        ("#### 3\n<answer>4", None),
        (r"#### 3 \boxed", None),
        (r"\boxed{}", None),
        # thinking and what comes after the end
        ("<think>#### 3</think> none", None),
        ("#### 3</think> #### 4", "4"),
        ("</think><think> #### 3", None),
        ("#### 3<|im_end|>\n#### 4", "3"),
        ("#### 3</s>4", "3"),
        ("#### 3</s> #### 4<|im_end|>", "3"),
        ("hm</think> #### 3</think> none", None),
        ("<|endoftext|>#### 4", None),
        # no marker
        ("", None),
        ("3", None),
        ("##### 3", None),
        (r"\boxedfoo{3}", None),
        ("12 answers", None),
    ],
)
def test_extraction(text, answer):
    """formats that others miss, first instead of last marker, half a box taken for an answer."""
    assert extract_answer(text) == answer
    assert format_reward(text) == float(answer is not None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 12", None),
        ("#### 12 ", None),
        ("#### 12\n", "12"),
        ("The answer is 12.", None),  # 12.5 was to come
        ("The answer is 12. So", "12"),
        ("答案是12", None),
        (r"\boxed{12}", "12"),
        (r"\boxed 12", None),
        (r"\boxed{Answer: 12}", "12"),
        (r"\boxed{\text{Answer: 12}", None),
        ("<answer>12</answer>", "12"),
        ("<answer>12", None),
        ("#### 12\nThe answer is", None),
        ("#### 12 Answer: .\nHm", "12"),
        ("#### 12<|im_end|>", "12"),
    ],
)
def test_truncated_completion(text, answer):
    """Half a number at the end of a truncated completion would be rewarded by chance."""
    assert extract_answer(text, truncated=True) == answer
    assert accuracy_reward(text, "12", truncated=True) == float(answer == "12")
    assert format_reward(text, truncated=True) == float(answer is not None)


ROOTS = r"The roots are $\boxed{2}$ and $\boxed{3}$."
ONE_LIST = [
    ROOTS, r"\boxed{2} and \boxed{3}", r"\boxed{3}, \boxed{2}", r"\boxed{2}; \boxed{3}",
    r"\boxed{2} & \fbox{3}", r"$\boxed{2}$ or $\boxed{3}$.", r"$$\boxed{2}\text{ or }\boxed{3}$$",
    r"\(\boxed{2}\) as well as \(\boxed{3}\)", r"\boxed{2} \quad \boxed{3}", r"$\boxed{2}$ $\boxed{3}$",
    r"\boxed{2}\boxed{3}", r"**\boxed{2}** and **\boxed{3}**", r"x = \boxed{2} or x = \boxed{3}",
    r"$x_1=\boxed{2}$, $x_2=\boxed{3}$", r"\(x = \boxed{2} or \boxed{3}\)",
    r"\boxed{x=2} or \boxed{x=3}", r"\boxed{2} cm, \boxed{3} cm", r"\boxed{2} (or \boxed{3})",
    r"The smaller root is \boxed{2} and the larger one is \boxed{3}.", r"\boxed{2}和\boxed{3}",
    r"\boxed{2}、\boxed{3}。", "$$\\boxed{2}$$\nand\n$$\\boxed{3}.$$", "\\boxed{2},\n\\boxed{3}",
    r"\\boxed{2} and \\boxed{3}", r"#### \boxed{2} and \boxed{3}",
    r"<answer>\boxed{2} and \boxed{3}</answer>", r"The answer is \boxed{2} or \boxed{3}",
    # boxes of the work stand before it
    r"We need \boxed{7}. Then \boxed{2} and \boxed{3}.",
    r"From \boxed{7} we get \boxed{2} and \boxed{3}.", "\\boxed{7}\n\\boxed{2} and \\boxed{3}",
    r"2x = \boxed{4}, x = \boxed{2} or x = \boxed{3}",
]  # fmt: skip
WORK = [
    r"The sum is \boxed{7}. The answer is \boxed{3}.",
    r"The sum is \boxed{7}. \boxed{3} and that is all", r"We get \boxed{7}, so \boxed{3}",
    r"\boxed{7} and hence \boxed{3}", r"\boxed{7} gives \boxed{3}",
    r"\boxed{7}, and the answer is \boxed{3}", r"2x = \boxed{6}, x = \boxed{3}",
    r"\boxed{2+1} = \boxed{3}", "\\boxed{7}\n\\boxed{3}",
    "\\boxed{7}\nThe sum and half of it are \\boxed{3}", "\\boxed{7}\n\nand \\boxed{3}",
    r"\boxed{7} > \boxed{3}", r"\boxed{7} - \boxed{3}", r"\boxed{7} \implies \boxed{3}",
    r"\boxed{7} wait, no: \boxed{3}", r"\boxed{\boxed{7}} \boxed{3}",
    r"\boxed{7} and \boxed{} \boxed{3}", r"\boxed{7} {\boxed{3}", r"\boxed{3} or \boxed{3}",
    r"\boxed{6/2}, \boxed{3}", r"$x = \boxed{3}$, $x = \boxed{3}$",
    r"\boxed{7} and " + "with as many words as here, " * 4 + r"\boxed{3}",
]  # fmt: skip


@pytest.mark.parametrize("text", ONE_LIST)
def test_boxes_of_one_sentence_are_a_list(text):
    """Of two roots the last one scored 1, and both of them 0; so did a guess with several boxes."""
    for gold in ("2, 3", "3 or 2", r"\{2, 3\}", read_gold(ROOTS)[0], read_gold(text)[0]):
        assert accuracy_reward(text, gold) == 1.0
    for gold in ("3", "2", "2, 4", "2, 3, 7", "(2, 3)"):
        assert accuracy_reward(text, gold) == 0.0
    one_more = r"\boxed{2}, \boxed{3} or \boxed{4}"
    for wrong in (r"\boxed{3}", r"\boxed{2}", r"\boxed{7} and \boxed{3}", one_more):
        assert accuracy_reward(wrong, read_gold(text)[0]) == 0.0


@pytest.mark.parametrize("text", WORK)
def test_a_box_of_the_work_is_no_part_of_the_answer(text):
    assert accuracy_reward(text, "3") == 1.0 and accuracy_reward(text, "7, 3") == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}, \boxed{2}, and \boxed{3}", "1, 2, 3"),
        (r"$a = \boxed{2}$ and $b_{1} = \boxed{3}$", "a = 2, b_{1} = 3"),
        (r"x + y = \boxed{2} or \boxed{3}", "2, 3"),  # y is not 2
        (r"(\boxed{2}, \boxed{3})", "(2, 3)"),
        (r"\left[\boxed{2}, \boxed{3}\right)", "[2, 3)"),
        (r"(\boxed{2}, \boxed{2})", "(2, 2)"),
        (r"\boxed{1,234} and \boxed{5}", "1,234, 5"),
        (r"\boxed{5}, \boxed{234}", "5, 234"),
        (r"\boxed{2} or \boxed{3", None),
        (r"\boxed{2} or \boxed{}", None),
        (r"x = \boxed{2} or x = \boxed{}", None),
        (r"\left( \boxed{2}, \boxed{3} \right]", "(2, 3]"),
        (r"\boxed{1} \boxed{2} and \boxed{{{{{3}}}}}", "{{{{3}}}}"),  # braces too deep to be listed
    ],
)
def test_text_of_a_list(text, answer):
    """Without its names or its brackets a list would match another order."""
    assert extract_answer(text) == answer


# --- equivalence ---


SPELLINGS = {
    "0.5": [
        r"\frac{1}{2}", r"\dfrac12", r"\tfrac{1}2", r"\frac 1 2", "1/2", "1 / 2", "2/4", ".5", "0.50", "+0.5", "½",
        "5e-1", r"5\times10^{-1}", r"\text{0.5}", r"\left(\frac{1}{2}\right)", "$0.5$",
    ],
    "1.5": ["1 1/2", r"1\frac{1}{2}", r"1 \frac12", "1½", "3/2", r"\frac{3}{2}"],
    "-3": ["−3", "–3", "- 3", "－３", "$-3$", "-$3", "$-3", "-3.0", r"\(-3\)", "(-3)"],
}  # fmt: skip
SAME = [(text, gold) for gold, texts in SPELLINGS.items() for text in texts] + [
    (r"-1\frac{1}{2}", "-1.5"), (r"\frac{-1}{2}", "-1/2"), (r"-\frac{1}{2}", r"\frac{1}{-2}"),
    ("5.", "5"), ("5.0", "5"), ("+5", "5"), ("005", "5"), ("-0", "0"), ("５", "5"), ("5,", "5"), ("{5}", "5"),
    ("1,234", "1234"), ("1{,}234", "1234"), (r"1\,234", "1234"), (r"1,\!234", "1234"), ("1\u202f234", "1234"),
    ("1,234,567.5", "1234567.5"), ("1.5e3", "1500"), ("1.5E+3", "1500"), (r"1.5\times10^3", "1500"),
    (r"1.5 \cdot 10^{3}", "1500"), ("1.5×10³", "1500"), ("10^{3}", "1000"),
    ("1.5 million", "1,500,000"),
    (r"\$18", "18"), ("$18", "18"), (r"$\$18$", "18"), ("$18.00", "18 dollars"), ("18€", "€18"), ("$18 per day", "18"),
    ("5 apples", "5"), ("5 cm", "5"), ("5cm", "5 cm"), (r"5\text{ cm}", "5"), (r"5\,\mathrm{cm}^2", "5 cm²"),
    ("3 hours", "3 hour"), ("2 boxes", "2 box"),
    ("60 km/h", "60"), (r"\frac{1}{2} cup of sugar", "0.5"),
    ("45°", "45"), (r"45^\circ", "45 degrees"), (r"45^{\circ}", "45"), ("20°C", "20"), ("5个苹果", "5"),
    ("50%", "50"), (r"50\%", "50 percent"), (r"$50\%$", "50"),
    ("x = 3", "3"), ("x=3", "x = 3.0"), (r"f(x) = x^{2}", "x^2"), ("(x, y) = (1, 2)", "(1,2)"),
    (r"x \in [0,1]", "[0, 1]"),
    ("(1, 2)", r"\left( 1,\, 2 \right)"), ("(0.5, 2)", r"(\frac12, 2)"), ("(1,234)", "(1, 234)"),
    ("[1,000, 2,000]", "[1000, 2000]"), (r"(-\infty, 3]", "(−∞, 3.0]"), (r"(1,2)\cup(3,4)", "(1, 2) ∪ (3, 4)"),
    ("3 or 4", "3, 4"), ("4 and 3", "3,4"), (r"\{4, 3\}", "3, 4"), ("1, 2, and 3", "3, 2, 1"), ("x=3 or x=4", "3, 4"),
    (r"\pm 3", r"\pm3"), ("a=3, b=4", "a = 3, b = 4.0"), ("3、4", "3, 4"),
    (r"\frac{\pi}{2}", r"\pi/2"), (r"\sqrt2", r"\sqrt{2}"), ("√2", r"\sqrt 2"),
    (r"\dfrac{\sqrt{3}}{2}", r"\frac{\sqrt3}{2}"),
    (r"x^{2}+1", "x^2 + 1"), (r"\text{Monday}", "monday"), ("(A)", "A"), (r"\text{(B)}", "b"),
    ("New  York", "new york"), ("{1, 2}", r"\{2, 1\}"), (r"\text{\boxed{\mathbf{3}}}", "3"),
    ("1" * 5000, "1" * 5000),
    # groups of three digits, as MATH prints them
    ("5 600", "5600"), ("5 600", "5,600"), ("-5 600", "-5600"), ("5 600.25", "5600.25"), ("1 000 000", "10^6"),
    (r"5\ 600", "5600"), (r"5\;600", "5600"), (r"5\,600", "5600"), ("12\u2009345", "12345"),
    (r"0.123\,456", "0.123456"),
    (r"32,\! 349", "32349"), (r"11,\! 111,\! 111,\! 100", "11111111100"), (r"(1,\!234)", "1234"),
    (r"(1,\!234, 5)", "(1234, 5)"), (r"\$5 600", "$5600"), ("5 600 km", "5600"), (r"\text{5 600}", "5600"),
    (r"1 234 \times 10^3", "1234000"), ("5 600 or 7", "7, 5600"), ("3\u20091/2", "3.5"), (r"3\,\frac12", "3.5"),
    # percent
    ("28 pct", "28%"), ("28 pct.", r"28\%"), ("28pct", "28"), ("28 percentage", "28 percent"), ("28percent", "28%"),
    # wrappers, JSON, what ends the text, quotes
    (r"\textnormal{Monday}", "monday"), (r"28\textnormal{ cm}", "28 cm"), (r"\textnormal{(B)}", "B"),
    (r"\\frac{1}{2}", "0.5"), (r"\\left( 1, 2 \\right)", "(1, 2)"), (r"\\{3, 4\\}", "3, 4"), (r"\\(3\\)", "3"),
    (r"32,\\! 349", "32349"), (r"\\sqrt{2}", r"\sqrt2"),
    (r"\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix}\frac12&x\\-1&3\end{pmatrix}", r"\begin{pmatrix} 1/2 & x \\ -1 & 3 \end{pmatrix}"),
    (r"\varnothing", r"\emptyset"), ("∅", r"\varnothing"), ("2^10", "2^{10}"), ("10^12", "10^{12}"),
    ("12<|im_end|>", "12"), ("12</s> 13", "12"), ("1/2<|endoftext|>", "0.5"),
    ('"12"', "12"), ("'12'", "12"), ("\u201c12\u201d", "12"), ("\u201812\u2019", "12"), ('"12."', "12"),
    ('"New York"', "new york"), (r'"\frac{1}{2}"', "0.5"), ('\\text{"Monday"}', "Monday"),
    # steps of arithmetic
    ("2+40 = 42", "42"), ("x = 2+40 = 42", "42"), ("x = 2+40 = 42", "x = 42"), ("2+40=40+2=42", "42"),
    (r"6 \times 7 = 42", "42"), (r"\frac{80+4}{2} = 42", "42"), ("2*(20+1) = 42 apples", "42"), (r"\sqrt{16} = 4", "4"),
    ("5! = 120", "120"), ("$2 + $40 = $42", "$42"), ("1,000 + 200 = 1 200", "1200"), ("2^{3} = 8", "8"),
    ("-3 + 5 = 2", "2"), ("(2+40 = 42)", "42"), ("1/2 = 0.5", "1/2"), ("42 = 42.0", "42"),
    ("7/3 = 2.33", "2.33"), ("x = 3/2 = 1.5", "1.5"), ("1+2=3 or 2+2=4", "3, 4"),
    (r"\sqrt{8} = 2\sqrt{2}", r"2\sqrt2"), (r"\boxed{2+40=42}", "42"),
    # names of units
    ("5 minutes", "5 min"), ("5 mins", "5min"), ("5 meters", "5 m"), ("5 metres", "5 m"),
    ("5 cm^{2}", "5 centimeters^2"),
    ("$5", "5 USD"), ("5usd", "5 dollars"), ("€5", "5 EUR"), ("5 sec", "5 s"), ("5 hrs", "5 hours"), ("5 ft", "5 feet"),
    ("60 km per hour", "60 kilometers per hour"), ("5 pounds", "£5"), ("5 lbs", "5 lb"), ("5mg", "5 mg"),
    # powers and indices, with braces and without
    ("x_1", "x_{1}"), ("x_n = 3", "x_{n} = 3"), ("x_{max} = 3", "3"), ("x_max = 3", "3"), (r"\log_2 3", r"\log_{2}3"),
    (r"\log_2x", r"\log_{ 2 } x"), ("a_nb", "a_{n}b"), ("101_2", "101_{2}"), ("x^2y", "x^{2}y"),
    ("x^-1", "x^{-1}"), ("x^0.5", "x^{0.5}"), ("e^ {-x}", "e^-x"), (r"x^\pi", r"x^{\pi}"), ("x²3", "x^{2}3"),
    (r"x^\frac12", "x^(1/2)"), (r"\mathbf{x^{2}}", "x^2"), ("10^ { 3 }", "1000"), ("√12", r"\sqrt{12}"),
    # quotients with a slash
    (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"), (r"\frac{3\pi}{4}", r"3\pi/4"), (r"(3 \pi)/4", "3π / 4"),
    (r"-\frac{2\sqrt{3}}{3}", r"-2\sqrt{3}/3"), (r"\frac{-\sqrt3}{2}", r"-\frac{\sqrt3}2"), (r"\frac{x^2}{2}", "x^2/2"),
    (r"\frac{1}{\sqrt{2}}", r"1/\sqrt2"), (r"1/(\sqrt{2})", r"1/\sqrt{2}"), (r"\frac{x}{-2}", "x/(-2)"),
    (r"x = \frac{ -3 }{4}", "-0.75"), (r"-\frac{-3}{4}", "0.75"), (r"\frac{\sqrt{x^{2}}}2", r"\frac{\sqrt{x^2}}{2}"),
    (r"\left(\frac{2}{3}\right)^2", r"\frac{2}{3}^2"), (r"\frac{\text{3}}{4}", "3/4"),
    (r"\infty", r"+\infty"), ("+∞", r"\infty"), (r"(-\infty, +\infty)", r"(-\infty, \infty)"),
    # digits of other scripts, and marks of direction or no width, which nobody sees
    ("\u0661\u0662", "12"), ("\u0967\u0968", "12"), ("\u200f12", "12"), ("\u202a12\u202c", "12"), ("12\u200b", "12"),
    # words in formulas: the blank behind a command is no blank between words
    (r"\pi xy", r"\pi x y"), ("x y", "xy"), ("2 sin x", "2sinx"), ("no table", "No  Table"), ("北京 大学", "北京大学"),
]  # fmt: skip
NOT_THREE = [
    "3 or 4", "3, 4", "4,3", "3|4", r"\pm 3", "±3", "[0,3]", "(3,4)", "3;4", "3 and 4", "3/4", "a=3, b=4", "b=4, a=3",
    r"3\text{ or }4", "3或4", "3、4", r"\{3\}", "[3]", "3=4", "3:4", "3-4", "3x", "3xy", "3 x", "3m", r"3\pi", "3 pi",
    "3i", "3!", "3^2", "3a/b", "3_4", "3 4", "3..0", "3?1", "not 3", "3 is wrong not", "3 million", "3 halves", "3万",
    "3 squared", r"\neq 3", ">3", "~ 33", "", " ", "$", "\0", "\ud800", "٣٣", "nan", "inf", "3/0", "1/0", "3e", "0x3",
    "None", "-3",
]  # fmt: skip
DIFFERENT = [(text, "3") for text in NOT_THREE] + [
    ("[0,100]", "0"), ("[0,100]", "100"), ("60001", "60000"), ("0.5", "50"), ("50%", "0.5"), ("0.333333333", "1/3"),
    ("3.0000000000000000000000001", "3"), ("9007199254740993", "9007199254740992"), ("1e-999", "0"),
    ("x = 3", "y = 3"), ("5 cm", "5 m"), ("$5", "5 cents"), ("12,34", "1234"), ("1,23", "123"), ("1_000", "1000"),
    ("3 4", "34"),
    ("(1,2)", "(2,1)"), ("(0,1)", "[0,1]"), ("(0,1]", "[0,1)"), ("(1,2)", "1,2"), ("(1,2,3)", "(1,2)"),
    ("1, 2", "1, 3"),
    (r"2\frac{1}{2}x", r"\frac{21}{2}x"), ("3/4", "4/3"), ("0x10", "16"), ("010", "8"), ("10**10**10", "10"),
    ("2**3", "8"),
    ("1.2.3", "1.2"), ("x^2", "x2"), ("x^10", "x^{10}"), ("x^-10", "x^{-10}"), ("x^10", "x^{1}0"),
    ("1" * 5000, "1" * 5001), ("A", "B"), ("1+1", "2"),
    # blanks that group no digits
    ("5 600", "5"), ("5 600", "600"), ("5 600", "5.600"), ("5 600", "5, 600"), ("5 600", "0.56"),
    ("5 600 or 600", "600"),
    ("3 1/2", "3"), ("3 1/2", "1/2"), ("3 1/2", "31/2"), ("3\u20091/2", "31/2"), ("5 600/7", "800"),
    ("5 600/7", "600/7"),
    ("1 2", "1"), ("1 2", "2"), ("1 2", "12"), ("1 2", "3"), ("1 2", "1, 2"), (r"1\,2", "12"), ("1\u20092", "12"),
    ("1 234 5", "12345"), ("1 234 5", "1234"), ("1 234 5", "5"), ("1 2345", "12345"), ("1234 567", "1234567"),
    ("12 34", "1234"), ("0 600", "600"), ("0,600", "600"), ("00 600", "600"), ("1,234 567", "1234567"),
    ("1 234,567", "1234567"), ("0.5 600", "0.5600"), ("5 600x", "5600"), ("5 -600", "5600"), ("5  6 00", "5600"),
    (r"5,\! 60", "560"), (r"5,\! 60", "5"), (r"1,\,234", "1234"), (r"(1,\,234)", "1234"), ("(5 600)", "(5, 600)"),
    # telephone numbers, dates, times, coordinates
    ("555 0199", "5550199"), ("555 123 4567", "5551234567"), ("020 794 600", "20794600"), ("2024 01 02", "20240102"),
    ("2024-01-02", "2024"), ("2024-01-02", "2021"), ("1/2/2024", "1/2"), ("3 Jan 2024", "3"), ("12:30", "12"),
    ("40.7, -74.0", "40.7"), ("40.7 -74.0", "40.7"), ("(40.7, -74.0)", "(-74.0, 40.7)"), ("[5 600]", "5600"),
    # units
    ("28 pct", "0.28"), ("28 pct", "28 cm"), ("28 percentage points", "28%"), ("28 pt", "28%"), ("1+1 = 2 cm", "2 m"),
    # backslashes, ends and quotes that stay
    (r"1\\2", "12"), (r"5 \\ 600", "5600"), (r"a \\ b", r"a \b"), (r"a \\ b", "ab"), (r"1 \\ 2", "1 2"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 12 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    (r"\\frac{1}{2}", r"\\frac{1}{3}"), (r"\\alpha", "alpha"),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{pmatrix} 1-2 \end{pmatrix}"),
    ("</s>4", "4"), ("</s>4", "<eos>5"), ("12<|im_end|>13", "13"), ("12<|im_end|>13", "1213"),
    ("**", "``"), ("''", '""'),
    ('5"', "5'"), ("5'6\"", "5"), ("f'(3)", "f(3)"), ("3'", "3"), ('"3" or "4"', "3"), ('"3" is wrong', "3"),
    ('the "3"', "3"), ('"3', "3"), ("\"3'", "3"), ('"3" "4"', "34"),
    # what is no step of arithmetic, or not its end
    ("2+40 = 42", "2"), ("2+40 = 42", "40"), ("2+40 = 42", "2+40"), ("2+40 = 42", "240"), ("2+40 =", "42"),
    ("2+40", "42"),
    ("2x = 6", "6"), ("x + y = 5", "5"), ("x^2 + y^2 = 25", "25"), ("3 = x", "x"), ("2+3 = x", "x"),
    ("y = 2x = 6", "6"),
    ("x = 2 or x = 3", "3"), ("x = 2 or x = 3", "2"), ("x = 3 y = 4", "4"), ("x = 3 but y = 4", "4"),
    ("x = 3, y = 4", "4"), ("y = 2+1 = 3", "x = 3"), ("2 + 3 = y = 5", "5"), ("1, 2 = 2", "2"), ("(1, 2) = 2", "2"),
    ("4 = 3", "3"), ("-3 = 3", "3"), ("(4) = 3", "3"), ("x = 2 = 3", "3"), ("$5 = 3", "3"), ("5 apples = 3", "3"),
    ("1 2 = 2", "2"), ("1:2 = 3:6", "6"), ("not 2+1 = 3", "3"), ("2+40 == 42", "2"),
    ("2 < x = 3", "3"), ("2 < 3 = 3", "3"), ("x = 3 < 4", "4"), ("x = 3 < 4", "3"), ("1 + 2 > 2 = 2", "2"),
    (r"4 \neq 3 = 3", "3"), (r"2 \le 3 = 3", "3"), (r"\frac{22}{7} \approx 3.14 = 3.14", "3.14"),
    # braces and brackets that say what belongs together
    ("e^{2}x", "e^{2x}"), ("x^{2}3", "x^{23}"), ("2^{10}0", "2^{100}"), ("2^{10}0", "2^100"), ("a^{n}b", "a^{nb}"),
    ("10^{2}5", "10^25"), ("x^{-1}2", "x^{-12}"), ("x^{0}.5", "x^0.5"), ("x^2_1", "x^{2_1}"), ("x²3", "x^23"),
    ("x_{1}2", "x_{12}"), ("x_1 2", "x_12"), (r"\log_2 3", r"\log_{23}"), ("√23", r"\sqrt{2}3"),
    ("x_{1} = 3", "x_2 = 3"),
    (r"\frac123", "1/23"), (r"\frac{1}{2} 3", r"\frac{1}{23}"), (r"\frac12.5", "1/2.5"), (r"\frac{2}{3}^2", "2/3^2"),
    (r"\frac42!", "4/2!"), (r"a/\frac{1}{2}", "a/1/2"), (r"x^\frac12", "x^1/2"), (r"x\frac{-3}{4}", "x - 3/4"),
    (r"2\frac{-1}{2}", "2 - 1/2"), (r"\frac{-1}{2}", "1/2"), (r"2\frac{3\pi}{4}", r"23\pi/4"), ("f(x)/2", "fx/2"),
    (r"\frac{x+1}{2}", "x+1/2"), (r"\frac{\sin x}{2}", r"\sin x/2"), (r"\frac{1}{2x}", "1/2x"), ("2(3)/4", "23/4"),
    (r"\frac{2}{\sqrt{3}x}", r"2/\sqrt{3}x"), ("x^(2)/3", "x^2/3"), (r"\boxed{3\boxed{4}}", "34"), (r"3\boxed{4}", "4"),
    (r"3+\infty", r"3\infty"), (r"+\infty", r"-\infty"), ("++", "+"),
    # blanks between words
    ("no table", "notable"), ("not able", "notable"), ("no table", "not able"), ("a part", "apart"), ("I ran", "Iran"),
    (r"\text{to day}", "today"),
    # names of units
    ("5 min", "5 m"), ("5 s", "5 m"), ("5 min", "5 mines"), ("5 mi", "5"), ("5 ms", "5 m"), ("5ms", "5"),
    ("5 m", "5 m m"),
    ("5 USD", "5 EUR"), ("£5", "5 lb"), ("5 cm^2", "5 cm"), ("5 M", "5"), ("$5 M", "5"), ("5 in", "5 min"),
]  # fmt: skip
NUMBER_WORDS = """one twos ten tens twelve nineteen forty sixties hundreds thousands millions quadrillion zillion bil
    mil mln dozen dozens lakh crore grand third fourths fifths sixths sevenths eighth eighths ninths tenths elevenths
    twelfths thirteenths twentieths twenty-fifths fortieths hundredths thousandths millionth half halves quarters
    half-hours fold tenfold double doubled doubling triple quadruple quintupled twice thrice halved negative inverted
    reciprocal squared times_ten times_itself out_of_ten point_five below_zero degrees_below_zero under_par
    divided_by_itself M MM"""
NOUNS = """apples minutes times folds zeros tents tennis canteens bills mills miles mild millionaires pavilions onions
    forts eightball grandmas pairs couples seconds overalls people_in_total times_a_day more_apples ten-dollar_bills
    two-story_houses five-year-olds sixth-graders"""
NO_UNITS = """5个半小时 5半 5分之一 5又二分之一 5点二 5成 5折 5打鸡蛋 5的平方 5的两倍 5萬 5億 5兆
    5⁴ 5x⁴ 5xθ 5θ 5① 10⁶"""
CHINESE = "5个苹果 5个三角形 5倍 5加仑 5平方米 5台打印机 5名乘客 5点 5€"


@pytest.mark.parametrize(("a", "b"), SAME)
def test_same_answers_match(a, b):
    """a right answer in another spelling scores 0."""
    assert answers_match(a, b) and answers_match(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different_answers_do_not_match(a, b):
    """Tolerances, hedging with a list, and taking the first number of a text reward wrong answers."""
    assert not answers_match(a, b) and not answers_match(b, a)


def test_a_noun_is_a_unit_and_a_number_word_is_none():
    """`5 fifths` and `5 dozen` scored as 5; or `5 tents` not, because a tenth begins like it."""
    for word in NUMBER_WORDS.split():
        for form in ("5 {}", r"5 \text{{ {} }}", "$5 {}", "5{}", "5 {} of them", "5 apples {}"):
            text = form.format(word.replace("_", " "))
            assert not answers_match(text, "5") and not answers_match("5", text) and answers_match(text, text), text
    for word in NOUNS.split():
        text = f"5 {word}".replace("_", " ")
        assert answers_match(text, "5") and not answers_match(text, "5 cm"), text
    assert [text for text in NO_UNITS.split() if answers_match(text, "5") or answers_match(text, "10")] == []
    assert [text for text in CHINESE.split() if not answers_match(text, "5")] == []


CHOICES = [
    r"\boxed{B. 45}", r"\boxed{(B) 45}", "The answer is (B) because it is blue.", "Answer: B) blue",
    r"\boxed{B}", r"\boxed{\text{(B) }45}", r"\boxed{\textbf{(B)}\ \frac{1}{2}}",
    r"\boxed{\mathrm{(B)}~45}", r"\boxed{(b) 45}", r"\boxed{B.45}", r"\boxed{(B)45}", r"\boxed{B: $45}",
    r"\boxed{\text{Option B}}", "The answer is option B.", "The answer is **B**.",
    "The answer is **B.** blue", "The answer is **(B)** blue", "Answer: (B)", "Answer: B)",
    "Answer: (B): 45", "Answer: (B) -3", "Answer: B - blue", "Answer: (B) – blue", "The answer is 'B'",
    "The answer is B because it is blue.", "The answer is B, since A is red.",
    "Answer: B is the correct one", "The answer is (B) because (A) is red.",
    "The answer is (B) because it is blue or green.", "The answer is B because b) is blue or green.",
    "Answer: (B) A dog",
    "Answer: (B) I and II", "<answer>B. 2, 3</answer>", "答案是B。", "答案：B、45", "答案：B．45", "答案：B：蓝色",
    "答案：选B", "答案是（B）45", "答案是B，因为是蓝色",
]  # fmt: skip
NO_CHOICES = [
    "A or B", "AB", "A, B", "B, A", "A and B", "(A) or (B)", "(B) or (C)", "B or C", "B. 45 or C. 50",
    "(B) 45 (C) 50", "(b) 45 (c) 50", "b) 4 c) 5", "(A)(B)", "(B)(C)", "(B)(B)", "B/C", "B:C", "B-C",
    "B.C.", "B + 1", "(B) + 1", "(B)^2", "(B)x", "B^2", "B_1", "B'", "2B", "B2", "B blue", "Bob",
    "P(B)", r"B \cup C", "not B", "B is wrong", "(B) is wrong", "(B) or not", "(B)?", "b because",
    "A because (B)", "B because it is, or (C)", "Bbecause", "(B) 45; 3", "B or 45",
    r"(B) \text{ or } 45", "the vitamin B", "B, 45", "A或B", "B或C", "B、C", "45",
]  # fmt: skip


@pytest.mark.parametrize("text", CHOICES)
def test_the_letter_of_a_choice_is_its_answer(text):
    """A right letter with its text, as the problem prints it, scored 0."""
    for gold in ("B", "(B)", r"\text{(B)}", r"$\textbf{B}$", ["B", "D"]):
        assert accuracy_reward(text, gold) == 1.0
    for gold in ("A", "C", "I", "45", "blue", "BC"):
        assert accuracy_reward(text, gold) == 0.0


@pytest.mark.parametrize("text", NO_CHOICES)
def test_two_choices_or_another_letter_are_none(text):
    """A hedge with several choices, or a word or a formula with the letter, would score 1."""
    assert accuracy_reward(rf"\boxed{{{text}}}", "B") == 0.0 and not answers_match(text, "B")


def test_only_a_gold_of_one_letter_is_a_choice():
    assert not answers_match("B", "B. 45") and not answers_match("B) 4", "B) 5")
    assert not answers_match("A cat", "A") and not answers_match("I think so", "I")
    for hedge in (r"\boxed{(B) 45} or \boxed{3}", r"\boxed{A} or \boxed{B}"):
        assert accuracy_reward(hedge, "B") == 0.0
    assert accuracy_reward(r"\boxed{A} and \boxed{C}", "A, C") == 1.0


def spellings(value: Fraction, rng: random.Random) -> str:
    top, bottom = abs(value.numerator), value.denominator
    factor = rng.randint(1, 9)
    forms = [f"{top}/{bottom}", rf"\frac{{{top * factor}}}{{{bottom * factor}}}", rf"\dfrac{{{top}}}{{{bottom}}}"]
    if bottom == 1:
        forms += [str(top), f"{top:,}", f"{top}.0", f"{top}.", f"{top:,}".replace(",", "{,}"), f"00{top}"]
    if 1 < bottom < top:
        forms += [f"{top // bottom} {top % bottom}/{bottom}", rf"{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}"]
    if 10**6 % bottom == 0:
        decimal = f"{top * 10**6 // bottom}"
        forms += [f"{decimal}e-6", rf"{decimal} \times 10^{{-6}}", f"{decimal[:-6]}.{decimal[-6:].zfill(6)}"]
    text = rng.choice(["-", "−", "- "] if value < 0 else ["", "", "+"]) + rng.choice(forms)
    wrapper = rng.choice(
        ["{}", "${}$", r"\({}\)", " {} ", r"\boxed{{{}}}", "x = {}", r"\text{{{}}}", "{}\\%", "{} apples"]
    )
    return wrapper.format(text) if r"\frac" not in text or wrapper != r"\text{{{}}}" else text


def test_rationals_match_exactly_when_equal():
    """Floats and tolerances: over random rationals in random spellings, matching is equality."""
    rng = random.Random(0)
    for _ in range(3000):
        a = Fraction(rng.randint(-3000, 3000), rng.choice([1, 1, 2, 3, 4, 7, 8, 10, 125]))
        b = rng.choice([a, a + Fraction(1, 10**6), -a, Fraction(rng.randint(-3000, 3000), rng.randint(1, 9))])
        text_a, text_b = spellings(a, rng), spellings(b, rng)
        if {text_a[-1], text_b[-1]} == {"s", "%"}:
            continue  # apples are no percents
        assert answers_match(text_a, text_b) == answers_match(text_b, text_a) == (a == b), (text_a, text_b)


# --- golds ---


@pytest.mark.parametrize(
    ("value", "gold"),
    [
        ("4", "4"),
        (" New York\n", "New York"),
        ("2+2=4\n#### 4", "4"),
        (r"So $\boxed{\frac12}$.", r"\frac12"),
        (4, "4"),
        (7.0, "7"),
        (7.25, "7.25"),
        (1e-7, "1e-07"),
        (True, "True"),
        (Decimal("2.50"), "2.50"),
        (Decimal("0.1234567890123456789"), "0.1234567890123456789"),
        (Fraction(1, 2), "1/2"),
        (np.float32(7), "7"),
        (np.array(["2", "3"]), ["2", "3"]),
        ({"ground_truth": "4", "style": "rule"}, "4"),
        ({"ground_truth": ["4"]}, "4"),
        ({"ground_truth": ["2", 3]}, ["2", "3"]),
        ('{"ground_truth": "2"}', "2"),
        ('{"style": "rule", "ground_truth": ["2"]}', "2"),
        ('{"ground_truth": 0.1234567890123456789}', "0.1234567890123456789"),
        ('{"ground_truth": ', '{"ground_truth":'),
        ('{"answer": "2"}', '{"answer": "2"}'),
        (["4"], "4"),
        (["4", None, 4.0], "4"),
        ([["2"], ["3", "#### 4"]], ["2", "3", "4"]),
        ('["2", "3"]', ["2", "3"]),
        ({"ground_truth": '["4"]'}, "4"),
        ("[2, 3]", "[2, 3]"),  # an interval
        ('["a" or "b"]', '["a" or "b"]'),
        # no gold
        (None, None),
        ("", None),
        (" \n", None),
        ([], None),
        ([None, ""], None),
        ({}, None),
        ({"answer": "4"}, None),
        ('{"ground_truth": NaN}', None),
        (float("nan"), None),
        (float("-inf"), None),
        (np.float64("nan"), None),
        (Decimal("NaN"), None),
        (Decimal("sNaN"), None),
        (Decimal("Infinity"), None),
        (b"4", None),
    ],
)
def test_gold_of_a_value(value, gold):
    """A column of numbers, verl's dictionaries and their JSON became texts that nothing matches."""
    assert read_gold(value) == (gold, False)


PROSE = {
    "The sum is 153.": "153", "It is -3": "-3", "There are 12 apples in the box.": "12",
    "He earns 15 dollars per hour, so $1,234.50 in all.": "$1,234.50", "Jo ends up with 7 marbles": "7",
    "She sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24=72 clips in both months.": "72",
    r"The probability is $\frac{1}{2}$.": "0.5", "Her share of it is 50%.": "50%",
    "They need 3 1/2 cups.": "3.5", "The city has 5 600 inhabitants.": "5600",
    "The area is 5 cm^2.": "5", "It costs 5 million dollars": "5000000",
    "So she is **12** years old.": "12", "总和是153。": "153", "小明有5个苹果。": "5",
}  # fmt: skip
NO_PROSE = [
    "New York", "World War 2", "5 apples", "60 km per hour", "3, 4", "2 sin x", "x = 3 or x = 4",
    "12:30", "x is 3", "It is five.", "The roots are 2 and 3.", "a is 3 and b is 4",
    "The values are a = 3 and b = 4.", "It took 3 hours and 20 minutes.", "There are 3 out of 5 left.",
    "The ratio is 3 : 5.", "The time is 12:30.", "at least 3 of the boys", "all but 3 of them",
    "It is not 3.", "the multiples of 3", "There are 5 dozen eggs",
    "Then there are 3 and a half apples.", "It is 20 degrees below zero.",
    r"The length is $3\sqrt{2}$.", r"The area is $12 \pi$.", "The result is 3x + 2.",
    "The result is x + 2.", "The value is 3 x here.", "一共用了5个半小时", "The next train is the 5th.",
    r"It lies between 3 and $4$.", r"The value is \boxed",
    r"The value is \boxed{3 or 4",
]  # fmt: skip


@pytest.mark.parametrize("text", PROSE)
def test_the_gold_of_prose_is_its_last_number(text):
    """No completion matches a sentence, and no error says that all of them score 0."""
    gold, from_prose = read_gold(text)
    assert from_prose and answers_match(gold, PROSE[text])
    assert accuracy_reward(f"The answer is {gold}.", gold) == 1.0
    assert read_gold({"ground_truth": [text, "8"]}) == ([gold, "8"], True)


@pytest.mark.parametrize("text", NO_PROSE)
def test_a_number_that_is_a_part_of_the_gold_is_not_the_gold(text):
    """`5` for `5 dozen`, or one root of two, would be a wrong answer with a reward of 1."""
    assert read_gold(text) == (text, False)


def test_gold_with_and_without_marker():
    """MATH's gold is a whole solution, DAPO-Math's the bare answer."""
    for value in (r"Therefore \boxed{\frac12}.", "1/2"):
        assert accuracy_reward("#### 0.5", read_gold(value)[0]) == 1.0
    assert accuracy_reward("0.5", "0.5") == 0.0  # no marker, no answer


def test_any_gold_of_a_list_is_right():
    for golds in (["2", "0.5"], ("2", "0.5")):
        assert answers_match("1/2", golds) and answers_match("2.0", golds)
        assert not answers_match("2, 0.5", golds) and not answers_match("1", golds)
    assert not answers_match("2", []) and not answers_match("", "") and not answers_match("", [""])


# --- any text, in bounded time ---


ALPHABET = (
    *r"0123456789+-.,/\{}()[]$%^_=|&#<>~*`: abcxeE" "\n\0\ud800−½３。、，∞√°答",
    r"\frac", r"\boxed{", r"\text{", r"\left(", r"\times", " or ", " and ", "10^", "#### ", "<answer>", "</answer>",
    "Answer:",
    "the answer is ", "答案是", "</think>", "</s>", r"\{", r"\}", r"\$", "cm", " apples", "million",
    " 600", r",\!", r"\,", "pct", r"\\", "1+2=", '"', "'", "“", "”", "# Answer\n", "答：", "【答案】",
)  # fmt: skip


def test_garbage_never_raises_and_is_symmetric():
    """one odd completion ends the run, or is scored differently as gold and as prediction."""
    rng = random.Random(1)
    for _ in range(8000):
        a, b = ("".join(rng.choices(ALPHABET, k=rng.randint(0, 25))) for _ in range(2))
        assert answers_match(a, b) == answers_match(b, a), (a, b)
        assert accuracy_reward(a, b, rng.random() < 0.5) in (0.0, 1.0)
        answer = extract_answer(a)
        assert answer is None or answer == answer.strip() != ""
        if a.strip():
            assert answers_match(a, a), a


M = 5_000_000
HUGE = {
    "letters": "a" * M, "digits": "1" * M, "angles": "<" * M, "backslashes": "\\" * M, "fullwidth": "３" * M,
    "surrogates": "\ud800" * M, "nul": "\0" * M, "boxes": r"\boxed{" * (M // 7), "answers": "Answer:" * (M // 7),
    "chinese": "答案是" * (M // 3), "headings": "####\n" * (M // 5), "tags": "<answer>" * (M // 8),
    "ends": "</s" * (M // 3), "ended": "</s>" * (M // 4), "answers in Chinese": "答：" * (M // 2),
    "hashes": "#" * M, "hashes and blanks": "#   " * (M // 4), "titles": "# Answer\n" * (M // 9),
    "TAGS": "<ANSWER>" * (M // 8),
    "thinks": "</think>" * (M // 8), "blanks": "#### " + " " * M, "stars": "Answer:" + "*" * M,
    "dots": "answer is " + ". " * M,
    "braces": r"\boxed" + "{" * 100_000, "closed braces": r"\boxed" + "{" * 40_000 + "}" * 40_000,
    "answers in boxes": r"\boxed{Answer: " * 5 + "{}" * 4_900 + "}" * 5,
    "answer in boxes": r"\boxed{" * 9 + "answer is " + "{}" * 4_900 + "}" * 9,
    "empty answers behind a box": r"\boxed{" + "{}" * 9_000 + "Answer:\n" * 9,
    "answer and braces": "Answer: " + "}" * M,
    "boxes in boxes": (r"\boxed{" * 9 + "{}" * 4_500 + r"\boxed{") * 99 + "{}" * 4_500 + "}" * 20,
    "million digits": "#### " + "1" * 10**6, "boxed million": r"\boxed{" + "1" * 10**6 + "}",
    "power": "#### 10**10**10",
    "list": r"\boxed{1} and " * (M // 15) + r"\boxed{2}",
    "names": r"\boxed{1}" + "a_aaaa=  " * 99 + r"x = \boxed{2}",
    "tower": r"\boxed{10^{10^{10}}}", "exponent": "#### 1e999999999", "commas": "#### " + "1," * 50_000,
}  # fmt: skip
DENSE = ["(", "[", "{", "1,", "1 or ", "1 ", "1 1/", r"\frac", r"\frac{", r"\frac{1}{", r"\text{", "a ", "a-", "1,111,",
"9", "x=",
         "x_", "(1,2),", "[1,(2,", r"\sqrt", "^{", "½", "% ", "({[", r"\{", r"\frac{a{b}", "$", "10^9",
         " 111", r",\!111", r",\! ", r"\,", "\\\\", r"\\a", "1+", "1=", "1+1=", "1+(", "1)", "+ ", "1!", "(1",
         "1+\\sqrt{",
         "1,111+", "'", '"', "“", "</s>", "<", r"\text{{", "(x)/", r"/(\sqrt{", r"/\frac", "^a", "_{", "ab ", r"\a ",
         "illion ", "ten-"]  # fmt: skip


LIMIT = 0.25  # seconds; on a quiet machine the worst take 0.03, and what backtracks takes minutes


def fastest(function) -> float:
    """The CPU time of the best of five calls, fewer if one is fast enough: a loaded machine must not fail the test."""
    times = []
    for _ in range(5):
        answers._parse_answer.cache_clear()
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
        if times[-1] < LIMIT:
            break
    return min(times)


@pytest.mark.parametrize("name", HUGE)
def test_huge_completions_take_no_time(name):
    """graders that hang on long digits, nested braces or a backtracking pattern."""
    text = HUGE[name]
    for function in (
        lambda: accuracy_reward(text, "3"),
        lambda: accuracy_reward(text, "3", truncated=True),
        lambda: accuracy_reward("#### 3", text),
        lambda: answers_match(text, "3"),
        lambda: read_gold(text),
    ):
        assert fastest(function) < LIMIT


@pytest.mark.parametrize("piece", DENSE)
def test_dense_answers_take_no_longer(piece):
    """As above, for what passes the length bound and meets every pattern and all recursion."""
    closing = piece[-1].translate(str.maketrans("([{", ")]}"))
    half = answers.MAX_ANSWER // 2 // len(piece) - 2
    for text in (piece * 2 * half, "1 " + piece * half + "!", piece * half + "1" + closing * half):
        assert len(text) < answers.MAX_ANSWER
        assert fastest(lambda text=text: answers_match(text, text + " ")) < LIMIT
        assert fastest(lambda text=text: read_gold(f"The sum is {text}")) < LIMIT
        assert fastest(lambda text=text: answers_match(f"B. {text}", "B")) < LIMIT
        boxes = rf"\boxed{{{text[:450]}}} and \boxed{{{text[:450]}}}"
        assert fastest(lambda boxes=boxes: extract_answer(boxes)) < LIMIT


@pytest.mark.parametrize("name", ["boxes", "answers", "answers in Chinese", "headings"])
def test_markers_without_number_are_not_kept(name):
    """A list of 50,000 of them took 0.1 to 0.2 s at the first call, most of it for the garbage collector."""
    tracemalloc.start()
    extract_answer(HUGE[name][: answers.MAX_TEXT])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


def test_answers_are_exact_far_down_a_long_completion():
    """The bound on the text must cut the start, never the end."""
    assert accuracy_reward("x" * M + "#### 3", "3") == 1.0
    assert accuracy_reward(r"\boxed{4}" + "x" * M + r"\boxed{\frac{6}{2}} ok", "3") == 1.0


# --- real solutions ---


@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8k_solutions_score_one_against_themselves(split):
    """A gold format that the extraction does not know would make its problem unsolvable."""
    path = GSM8K / f"{split}.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}")
    solutions = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(solutions) == {"train": 7473, "test": 1319}[split]
    for solution in solutions:
        gold = solution.rpartition("#### ")[2]
        body = solution.rpartition("#### ")[0]
        off_by_one = str(int(gold.replace(",", "")) + 1)
        assert read_gold(solution) == (gold, False) and accuracy_reward(solution, gold) == 1.0, solution
        assert accuracy_reward(rf"{body}\boxed{{{gold}}}", gold) == 1.0
        assert accuracy_reward(f"{body}#### {off_by_one}", gold) == 0.0, solution
