"""A conversation on disk: /save, /load, --session and --cache.

Stops: a conversation that comes back with other text than its tokens spell, a file of another
conversation that is overwritten, a document that is read twice.
"""

import pytest

from engine import LLM, SamplingParams
from engine.base.errors import SavedFileError, UsageError
from engine.chat import commands
from engine.chat.talk.chat import Chat
from engine.chat.talk.keeping import KeptSession
from engine.saved.cache import BlockCache
from engine.terminal.display import Display
from tests.builders import POCKET

DOCUMENT = "The code of the red door is 4711. " + "The garden is green and wide. " * 40
PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def llm():
    return LLM(str(POCKET), max_context=2048, threads=1)


@pytest.fixture
def chat(llm, capsys):
    made = Chat(llm, PARAMS, Display())
    yield made
    made.conversation.session.close()


def test_a_saved_conversation_goes_on_where_it_was(llm, chat, tmp_path, capsys):
    chat.read(DOCUMENT, "doors.txt")
    chat.ask("What is the code of the red door?")
    commands.run(chat, f"/save {tmp_path / 'talk'}")
    chat.ask("And of the green one?")
    other = Chat(llm, PARAMS, Display())
    commands.run(other, f"/load '{tmp_path / 'talk'}'")
    assert other.conversation.can_retry
    other.ask("And of the green one?")
    mine, theirs = chat.conversation, other.conversation
    assert theirs.text == mine.text and list(theirs.ends) == list(mine.ends)
    assert theirs.session.ids == mine.session.ids
    assert theirs.messages == mine.messages and theirs.documents == mine.documents
    before = mine.text
    for one in (chat, other):
        one.retry()
    assert theirs.text == mine.text == before
    commands.run(other, "/reset")
    assert [d.name for d in theirs.documents] == ["doors.txt"] and theirs.home == mine.home
    assert len(theirs.session) == mine.home[0] > 200
    theirs.session.close()
    assert "are back (doors.txt); nothing was read again" in capsys.readouterr().err


def test_a_file_that_does_not_serve_changes_nothing(chat, tmp_path):
    chat.ask("Hello")
    ids = list(chat.conversation.session.ids)
    (tmp_path / "no").write_bytes(b"x" * 99)
    chat.conversation.session.save(tmp_path / "bare")  # a session without a conversation
    for name in ("no", "bare", "missing"):
        with pytest.raises(SavedFileError, match=name):
            commands.run(chat, f"/load {tmp_path / name}")
        assert chat.conversation.session.ids == ids
    with pytest.raises(UsageError, match="/load talk"):
        commands.run(chat, "/load")


def test_a_session_file_is_read_at_the_start_and_written_at_the_end(llm, tmp_path, capsys):
    path, held = tmp_path / "talk", []
    for turn in range(2):
        chat = Chat(llm, PARAMS, Display())
        with pytest.raises(KeyboardInterrupt), KeptSession(chat, path) as kept:
            assert kept.resumed == (turn == 1)
            assert len(chat.conversation.session) == (held[-1] if held else 0)
            chat.ask("Hello")
            held.append(len(chat.conversation.session))
            raise KeyboardInterrupt
        chat.conversation.session.close()
    path.write_bytes(b"another program's file")
    chat = Chat(llm, PARAMS, Display())
    with KeptSession(chat, path):
        chat.ask("Hello")
    chat.conversation.session.close()
    assert path.read_bytes() == b"another program's file"
    assert "will not be saved there" in capsys.readouterr().err


def test_a_document_in_the_cache_is_not_read_again(llm, tmp_path):
    texts, read = [], []
    for _ in range(2):
        chat = Chat(llm, PARAMS, Display())
        chat.conversation.cache = BlockCache(tmp_path)
        chat.read(DOCUMENT, "doors.txt")
        chat.ask("What is the code of the red door?")
        texts.append(chat.conversation.text)
        read.append(chat.conversation.session.counters.prefill_tokens)
        chat.conversation.session.close()
    assert texts[0] == texts[1] and read[0] - read[1] >= 256
