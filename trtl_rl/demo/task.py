"""The demo's task: two-digit addition with its carries written out, judged exactly.

>>> answer(47, 85)
'7+5=12,4+8+1=13,132'
"""

from __future__ import annotations

SYMBOLS = "0123456789+=,"


def demo_rows() -> list[dict[str, str]]:
    """All 10,000 sums ``a+b=`` with two digits each, and their answers of 16 to 20 characters."""
    return [{"prompt": f"{a:02d}+{b:02d}=", "answer": answer(a, b)} for a in range(100) for b in range(100)]


def answer(a: int, b: int) -> str:
    """Ones with their sum, tens with carry and their sum, the result."""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    return f"{a % 10}+{b % 10}={ones},{a // 10}+{b // 10}+{ones // 10}={tens},{a + b}"
