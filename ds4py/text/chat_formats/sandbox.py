"""Running a template that came with a model file, within limits.

Owns: the Jinja environment that chat templates are written for, and its bounds. Refuses to know:
messages and tokens. Invariant: a template sees only the values it is given, and can change none of
them; its length, its steps, its time and its output are bounded, and it ends in text or in one of
the two errors below.

Not bounded is the memory that one single filter or method takes before its result is measured, such
as `'x'.ljust(10 ** 9)`: anyone who loads a model file trusts it to that degree.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SOURCE: Final = 1 << 19
"""Characters of a template; the longest in use have about 20 thousand."""

MAX_OUTPUT: Final = 1 << 25
"""Characters of a rendered prompt."""

MAX_STEPS: Final = 5_000_000
"""Loop rounds, macro calls, method calls and operators in one rendering."""

MAX_SECONDS: Final = 10.0
"""Time of one rendering."""

MAX_ITEMS: Final = 1 << 25
"""Characters or items that one operator, call or filter may produce."""


class TemplateFailedError(Exception):
    """The template is broken, forbidden, or over a limit."""


class TemplateRefusalError(Exception):
    """The template called `raise_exception`: its author refuses these messages."""


@dataclass(slots=True)
class _Budget:
    steps: int
    deadline: float

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateFailedError(f"more than {MAX_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise TemplateFailedError(f"more than {MAX_SECONDS:g} seconds")


# One per rendering, and so one per thread, although all threads share the compiled template.
_budget: ContextVar[_Budget] = ContextVar("ds4py_template_budget")


class _CountingGenerator(CodeGenerator):
    """Compiles a count into each loop and macro, where a template could spend its time."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        blocks: list[nodes.For | nodes.Macro] = [*node.find_all(nodes.For)]
        blocks += node.find_all(nodes.Macro)
        for block in blocks:
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(tick, lineno=block.lineno))
        node.set_environment(self.environment)
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _GenerationTag(Extension):
    """`{% generation %}` marks what training looks at; for inference it is just its contents."""

    tags = {"generation"}  # noqa: RUF012  (the library's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset({"*", "**", "+"})

    def tick(self) -> None:
        """Count one step."""
        _budget.get().spend()

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method of the template, counted."""
        self.tick()
        return _measured(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result may be much larger than its operands."""
        self.tick()
        if _result_size(operator, left, right) > MAX_ITEMS:
            raise TemplateFailedError(f"an operator {operator} with a result over {MAX_ITEMS}")
        return super().call_binop(context, operator, left, right)

    def concatenate(self, parts: tuple[object, ...]) -> str:
        """Compute the operator `~`."""
        self.tick()
        return str(_measured("".join(map(str, parts))))


def _measured(value: Any) -> Any:
    """Return a result unless it is too large: repeated doubling ends here."""
    if _length(value) > MAX_ITEMS:
        raise TemplateFailedError(f"a value of more than {MAX_ITEMS} characters or items")
    return value


def _measuring(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        return _measured(function(*args, **kwargs))

    return measured


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Estimate characters, items or bits of a result."""
    if operator == "**":
        both = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * max(right, 0) if both else 0
    if operator == "+":
        return _length(left) + _length(right)
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    sequence, count = (right, left) if isinstance(left, int) else (left, right)
    return _length(sequence) * count if isinstance(count, int) else 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  (signature that templates are written for)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Write JSON as the chat templates expect it: without the HTML escapes of Jinja's own."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise TemplateRefusalError(f"{message!s:.500}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    for name, function in environment.filters.items():
        environment.filters[name] = _measuring(function)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class BoundedTemplate:
    """A compiled chat template; safe to use from several threads.

    Args:
        source: Jinja source as found in a model file.

    Raises:
        TemplateFailedError: The source is too long or does not compile.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateFailedError(f"{len(source)} characters, more than {MAX_SOURCE}")
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # hostile source ends in nearly any exception
            raise TemplateFailedError(_describe(error)) from error

    def render(self, variables: Mapping[str, object]) -> str:
        """Return the text for some variables.

        Raises:
            TemplateRefusalError: The template itself called `raise_exception`.
            TemplateFailedError: Anything else went wrong, or a limit was reached.
        """
        token = _budget.set(_Budget(MAX_STEPS, time.monotonic() + MAX_SECONDS))
        try:
            return self._join_output(variables)
        except (TemplateRefusalError, TemplateFailedError):
            raise
        except Exception as error:  # hostile code ends in nearly any exception
            raise TemplateFailedError(_describe(error)) from error
        finally:
            _budget.reset(token)

    def _join_output(self, variables: Mapping[str, object]) -> str:
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(variables):
            length += len(piece)
            if length > MAX_OUTPUT:
                raise TemplateFailedError(f"more than {MAX_OUTPUT} characters of output")
            pieces.append(piece)
        return "".join(pieces)


def _describe(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    where = f"line {line}: " if isinstance(line, int) else ""
    return f"{where}{type(error).__name__}: {error!s:.300}"
