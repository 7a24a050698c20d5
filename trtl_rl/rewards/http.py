"""``http``: a reward that another machine computes."""

from __future__ import annotations

from typing import Any

from trtl_rl.errors import UserError

RETRIED = (408, 429, 500, 502, 503, 504)


class HttpReward:
    """POSTs each batch as JSON, and reads one number or ``null`` per completion.

    Sent: ``{"prompts": […], "completions": […], "columns": {name: […]}}``. Answered: a list, or ``{"rewards": […]}``.
    A lost connection, a time limit and the statuses 408, 429 and 5xx are tried again, after ``backoff``, 2 · backoff, …
    seconds or what ``Retry-After`` says; so a server must expect the same batch twice. Other statuses fail at once.

    Args:
        url: Where to post.
        timeout: Seconds for one attempt. All attempts together have to fit the reward's own time limit.
        retries: Attempts after the first.
        headers: For example an authorization. Write ``$NAME`` for the value of an environment variable.
        columns: Columns of the data to send; default: all.

    Raises:
        UserError: the URL is none, or a header names a variable that is not set.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 10.0,
        retries: int = 3,
        backoff: float = 0.5,
        headers: dict[str, str] | None = None,
        columns: list[str] | None = None,
    ) -> None:
        if not str(url).startswith(("http://", "https://")):
            raise UserError(f"Reward 'http': url={url!r} must begin with http:// or https://.")
        self.url, self.timeout, self.columns = url, timeout, columns
        self._retries, self._backoff = retries, backoff
        self._headers = {name: _expand(str(value)) for name, value in (headers or {}).items()}
        self._session: Any = None

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> Any:
        columns.pop("completion_ids", None)
        chosen = columns if self.columns is None else {name: columns[name] for name in self.columns}
        body = {"prompts": prompts, "completions": completions, "columns": chosen}
        answer = self._open().post(self.url, json=body, timeout=self.timeout)
        if answer.status_code != 200:
            raise RuntimeError(f"{self.url} answered {answer.status_code} {answer.reason}: {answer.text[:500]}")
        found = answer.json()
        return found.get("rewards") if isinstance(found, dict) else found

    def _open(self) -> Any:
        if self._session is None:  # not in __init__: a session stays in the process that made it
            import requests
            from requests.adapters import HTTPAdapter
            from urllib3.util.retry import Retry

            retry = Retry(
                total=self._retries,
                backoff_factor=self._backoff,
                status_forcelist=RETRIED,
                allowed_methods=None,  # POST too
                raise_on_status=False,
            )
            self._session = requests.Session()
            self._session.headers.update(self._headers)
            for scheme in ("http://", "https://"):
                self._session.mount(scheme, HTTPAdapter(max_retries=retry))
        return self._session


def _expand(value: str) -> str:
    """``$NAME``, also within ``Bearer $NAME``, from the environment: secrets stay out of a run's config.yaml."""
    import os

    words = value.split(" ")
    for i, word in enumerate(words):
        if word.startswith("$"):
            if word[1:] not in os.environ:
                raise UserError(f"Reward 'http': the environment variable {word[1:]} of a header is not set.")
            words[i] = os.environ[word[1:]]
    return " ".join(words)
