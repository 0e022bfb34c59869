"""From conversations to rows: which answers are missing, and how one conversation is answered."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

from domino_kit.chat_template import encode_row, prompt_ids
from domino_kit.conversations import parse_row
from domino_kit.train.answers import Answer, Ask, Asking, Question, Refused
from domino_kit.train.prepare_output import AnswerFile, answer_row, prompt_hash
from domino_kit.train.prepare_prompts import Conversation
from domino_kit.train.prepare_report import Progress, Tally

RESERVED = 8
"""Positions of a context that SGLang keeps for itself; every engine drops the same prompts."""

Messages = list[dict[str, Any]]


class Rows:
    """The rows of all ``conversations``; ``files`` are the output and perhaps the held-out one.

    ``everything`` says that no prompt was left out by a limit. Raises ``ValueError`` if an answer
    that is there already belongs to another prompt.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        files: Sequence[AnswerFile],
        asking: Asking,
        tally: Tally,
        context: int,
        seed: int,
        settings: str,
        *,
        everything: bool,
    ) -> None:
        self.files, self.tally = files, tally
        self._asking, self._context, self._seed = asking, context, seed
        self._settings = settings
        self.names = [c.answer_id(place) for c in conversations for place in range(len(c.rounds))]
        self._check_known(everything)
        self._todo: list[tuple[Conversation, Messages, int]] = []
        for conversation in conversations:
            messages, place = self._answered(conversation)
            if place < len(conversation.rounds):
                self._todo.append((conversation, messages, place))
        self.missing = sum(len(c.rounds) - place for c, _, place in self._todo)

    def _check_known(self, everything: bool) -> None:
        known = set(self.names)
        for file in self.files:
            unknown = next((name for name in file.done if name not in known), None)
            if everything and unknown is not None:
                raise ValueError(
                    f"{file.path} has the answer {unknown!r}, but --prompts has no such prompt; "
                    "choose another --output for other prompts."
                )

    def _file(self, conversation: Conversation) -> AnswerFile:
        return self.files[-1] if conversation.held_out else self.files[0]

    def _answered(self, conversation: Conversation) -> tuple[Messages, int]:
        """The conversation with the answers that are there already, and how many they are."""
        file = self._file(conversation)
        messages: Messages = []
        for place, turns in enumerate(conversation.rounds):
            done = file.done.get(conversation.answer_id(place))
            if done is None:
                return messages, place
            messages += turns
            if done.prompt != prompt_hash(messages):
                raise ValueError(
                    f"{file.path} has the answer {conversation.answer_id(place)!r} to another "
                    f"prompt than {conversation.where}; choose another --output for other prompts."
                )
            messages.append(done.message)
        return messages, len(conversation.rounds)

    # -- asking ----------------------------------------------------------------------------------

    def first_question(self) -> Question | None:
        """The first question to come, ``None`` if it is one that will be dropped."""
        conversation, messages, place = self._todo[0]
        return self._question(conversation, messages + conversation.rounds[place], place)

    def _question(
        self, conversation: Conversation, messages: Messages, place: int
    ) -> Question | None:
        """The question, or ``None`` if its answer would not fit into the context.

        Raises ``ValueError`` naming the row if the template refuses it.
        """
        extra = {} if conversation.tools is None else {"tools": conversation.tools}
        try:
            ids = prompt_ids(self._asking.tokenizer, messages, self._asking.thinking, **extra)
        except ValueError as error:
            raise ValueError(f"{conversation.where}: {error}") from None
        if len(ids) + self._asking.max_new_tokens + RESERVED > self._context:
            return None
        name = f"{self._seed}-{conversation.answer_id(place)}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
        return Question(messages, conversation.tools, ids, seed)

    async def answer_all(self, ask: Ask, concurrency: int, progress: Progress) -> None:
        """Answer everything that is missing, so many conversations at once.

        Raises whatever ends it; rows until then are written.
        """
        waiting = iter(self._todo)

        async def work() -> None:
            for conversation, messages, place in waiting:
                await self._answer(conversation, messages, place, ask, progress)

        workers = [asyncio.create_task(work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _answer(
        self,
        conversation: Conversation,
        messages: Messages,
        first: int,
        ask: Ask,
        progress: Progress,
    ) -> None:
        """Answer the turns of one conversation from ``first`` on, until one has no answer."""
        for place in range(first, len(conversation.rounds)):
            messages = messages + conversation.rounds[place]
            reason, answer = await self._ask_once(conversation, messages, place, ask)
            if answer is None:
                left = len(conversation.rounds) - place
                self.tally.dropped[reason] += 1
                if left > 1:
                    self.tally.dropped["turns after one without an answer"] += left - 1
                progress.advance(self.tally.tokens, left)
                return
            messages = [*messages, answer.message]
            progress.advance(self.tally.tokens)

    async def _ask_once(
        self, conversation: Conversation, messages: Messages, place: int, ask: Ask
    ) -> tuple[str, Answer | None]:
        """One answer, written; or the reason why there is none."""
        question = self._question(conversation, messages, place)
        if question is None:
            limit = self._asking.max_new_tokens
            return f"too long for the context of {self._context} with {limit} new tokens", None
        try:
            answer = await ask(question)
        except Refused as error:
            self.tally.first_refusal = self.tally.first_refusal or str(error)
            return "engine error", None
        message = answer.message
        in_reasoning = answer.finish == "length" and message.get("reasoning_content")
        if not (message["content"].strip() or message.get("tool_calls") or in_reasoning):
            return "empty answer", None
        row = answer_row(
            conversation.answer_id(place), [*messages, message], answer.finish, self._settings,
            conversation.tools,
        )  # fmt: skip
        if not self._check(row, answer):
            return "answer that the template does not show unchanged", None
        self._file(conversation).write(row)
        self.tally.answers += 1
        self.tally.tokens += answer.count
        self.tally.cut += answer.finish == "length"
        return "", answer

    def _check(self, row: dict[str, Any], answer: Answer) -> bool:
        """Whether training can read the row; counts those whose tokens are not the target's."""
        asking = self._asking
        try:
            ids, mask = encode_row(
                asking.tokenizer, parse_row(row, row["id"]), asking.thinking, asking.end_tokens
            )
        except ValueError:
            return False
        learnt = [token for token, flag in zip(ids, mask, strict=True) if flag]
        self.tally.inexact += answer.tokens is not None and learnt != answer.tokens
        return True
