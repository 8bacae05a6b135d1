"""Conversations on disk: /save, /load and --session."""

from __future__ import annotations

from pathlib import Path

from engine.base.errors import ContextTooLong, SavedFileError, UsageError
from engine.base.figures import count, human
from engine.chat.talk.chat import Chat
from engine.saved.ranks.shares import saved_bytes


def named(rest: str, command: str) -> Path:
    """The file that a command names. Raises UsageError where it names none."""
    if not rest:
        raise UsageError(
            f"/{command}: found nothing, expected a file, such as /{command} talk.omnikv"
        )
    return Path(rest.strip("'\"")).expanduser()


def save(chat: Chat, path: Path) -> None:
    """Write the conversation to a file. Raises SavedFileError, an earlier file as it was."""
    conversation = chat.conversation
    conversation.session.save(path, conversation.state())
    chat.display.line(
        f"{path}: {count(len(conversation.session))} saved, {human(saved_bytes(path))}"
    )


def load(chat: Chat, path: Path) -> None:
    """Go on with the conversation in a file. Raises SavedFileError, the one until now unchanged."""
    session, state = chat.llm.restore(path)
    try:
        chat.conversation.resume(session, state)
    except SavedFileError as error:
        session.close()
        raise SavedFileError(f"{path}: {error}") from None
    documents = ", ".join(d.name for d in chat.conversation.documents)
    about = f" ({documents})" if documents else ""
    chat.display.line(f"{path}: {count(len(session))} are back{about}; nothing was read again")


class KeptSession:
    """--session FILE: read at the start if it is there, written at the end, at Ctrl-C too."""

    def __init__(self, chat: Chat, path: Path | None) -> None:
        self._chat, self._path = chat, path
        self.resumed = False

    def __enter__(self) -> KeptSession:
        if self._path is not None and self._path.exists():
            try:
                load(self._chat, self._path)
                self.resumed = True
            except (SavedFileError, ContextTooLong) as error:
                # another model's file may be worth more than this conversation
                self._chat.display.line(f"{error} (this conversation will not be saved there)")
                self._path = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None and len(self._chat.conversation.session):
            save(self._chat, self._path)
