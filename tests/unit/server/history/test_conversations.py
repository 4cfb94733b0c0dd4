"""What is remembered of a reply."""

import pytest

from ds4py.server.history.conversations import ConversationMemory
from ds4py.server.requests.events import Answer, CallClosed, CallFragment, CallOpened, TextPiece
from ds4py.server.requests.request import ChatMessage, Conversation, PastCall, Toolbox

ASK = ChatMessage("user", "hi")
TOKENS = (1, 2, 3)


def answer(*, called):
    reply = Answer()
    reply.add(TextPiece("", reasoning="hm"))
    reply.add(TextPiece("yes"))
    if called:
        for event in (CallOpened(0, "c", "f"), CallFragment(0, "{}"), CallClosed(0)):
            reply.add(event)
    return reply


def keep(memory, *turns, called=False, tokens=TOKENS):
    """What is written of a conversation that is kept, in the order in which it is looked for."""
    shown = []

    def visible(said):
        shown.append(said)
        return [len(shown)]

    conversation = Conversation(turns, Toolbox(("{}",)))
    memory.keep(conversation, answer(called=called), tokens, n_prompt=2, visible=visible)
    memory.exact_tokens.visible(tokens)
    return shown


@pytest.mark.parametrize("called", [False, True])
def test_clients_are_expected_to_send_the_reasoning_of_calls_back_and_no_other(called):
    first, second = keep(ConversationMemory(), ASK, called=called)
    assert (first[0], second[0]) == (ASK, ASK)
    assert [first[-1].reasoning, second[-1].reasoning] == (["hm", ""] if called else ["", "hm"])


def test_calls_wait_for_their_results_with_the_tools_on_offer():
    memory = ConversationMemory()
    keep(memory, ASK, called=True)
    call = PastCall("c", "f", "{}")
    reply = ChatMessage("assistant", "yes", reasoning="hm", calls=(call,))
    assert memory.pending_tools.find(["c"]) == Conversation((ASK, reply), Toolbox(("{}",)))


def test_a_turn_that_the_client_began_is_one_turn():
    begun = ChatMessage("assistant", "Oh ", reasoning="so ")
    said, _ = keep(ConversationMemory(), ASK, begun)
    assert said == (ASK, ChatMessage("assistant", "Oh yes"))


def test_of_a_reply_that_is_not_all_its_tokens_say_nothing_is_written():
    assert keep(ConversationMemory(), ASK, tokens=()) == []
