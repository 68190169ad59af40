"""What people type in answer to a request: numbers, and the words of eight languages for allowing and denying.

Guarantees: a text is taken for an answer only where the whole of it is one, whatever its case, width and closing punctuation; a
question mark makes it none. The one exception is a denial, behind which a reason may follow (``no, because …``). Nothing that
allows is recognised by its beginning.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pkg import limits, texts

Meaning = Literal["allow_once", "allow_session", "deny", "deny_why"]

LABELS: Final[Mapping[Meaning, str]] = {
    "allow_once": "interaction.allow_once",
    "allow_session": "interaction.allow_session",
    "deny": "interaction.deny",
    "deny_why": "interaction.deny_why",
}
"""The texts of the four choices; they count as words, too."""

_ALLOW: Final = (
    "yes|y|yes please|yep|ok|okay|o.k|sure|go ahead|once|just once|only once|just this once|allow|allow it|allow this"
    "|allow once|allow it once|allow this once|approve|approve it|approve once|approved|yes, allow|yes allow|yes, once"
    "|允许|允许一次|允许这次|仅允许一次|只允许一次|仅此一次|本次允许|同意|批准|是|是的|好|好的|可以|行|确认允许"
    "|允許|允許一次|允許這次|僅允許一次|只允許一次|僅此一次|本次允許|核准|核准一次|准許"
    "|許可|許可する|許可します|一度だけ許可|一度だけ許可する|一回だけ許可|1回だけ許可|今回だけ許可|今回のみ許可|はい|ええ|承認|承認する|承認します|オーケー|オッケー"
    "|อนุญาต|อนุญาตครั้งเดียว|อนุญาตหนึ่งครั้ง|อนุญาตครั้งนี้|ใช่|ใช่ครับ|ใช่ค่ะ|ได้|ได้ครับ|ได้ค่ะ|ตกลง|ตกลงครับ|ตกลงค่ะ|โอเค|อนุมัติ"
    "|cho phép|cho phép một lần|cho phép 1 lần|cho phép lần này|chỉ lần này|có|vâng|được|đồng ý|chấp nhận|chấp thuận|phê duyệt"
    "|sí|si|vale|de acuerdo|permitir|permite|permítelo|permitir una vez|permitir esta vez|permitir solo una vez|solo una vez"
    "|solo esta vez|sólo esta vez|aceptar|acepto|aprobar|apruebo|adelante"
    "|да|ок|окей|хорошо|можно|разрешить|разрешаю|разреши|разрешить один раз|разрешить однократно|разрешить разово|один раз"
    "|только один раз|только сейчас|одобрить|одобряю|согласен|согласна"
)
_SESSION: Final = (
    "allow session|allow for session|allow for the session|allow for this session|allow this session|allow in this session"
    "|for this session|for the session|this session|always this session|always for this session|always in this session"
    "|always allow this session|always allow for this session|always allow in this session|allow always this session"
    "|yes for this session|yes, for this session|approve for this session"
    "|本次会话|本次会话允许|本次会话内允许|本次会话中允许|允许本次会话|在本次会话中允许|在本会话中允许|此会话允许|允许此会话|在此会话中允许|本次会话始终允许|本次会话总是允许"
    "|此会话始终允许|在此会话中始终允许|会话内允许"
    "|本次工作階段|本次工作階段允許|本次工作階段內允許|允許本次工作階段|此工作階段允許|在此工作階段中允許|在本次工作階段中允許|此工作階段一律允許|本次工作階段一律允許"
    "|本次會話允許|允許本次會話|在本次會話中允許|本次對話允許|允許本次對話"
    "|このセッション|このセッションで許可|このセッションで許可する|このセッションでは許可|このセッションでは許可する|このセッション中は許可|このセッション中は許可する|このセッションでは常に許可"
    "|このセッション中は常に許可|このセッションの間許可|セッション中は許可"
    "|อนุญาตในเซสชันนี้|อนุญาตสำหรับเซสชันนี้|อนุญาตตลอดเซสชันนี้|อนุญาตเซสชันนี้|เซสชันนี้|อนุญาตเสมอในเซสชันนี้|เสมอในเซสชันนี้"
    "|phiên này|cho phép phiên này|cho phép trong phiên này|cho phép cho phiên này|cho phép trong phiên|luôn trong phiên này"
    "|luôn cho phép trong phiên này|luôn luôn trong phiên này"
    "|esta sesión|esta sesion|permitir esta sesión|permitir esta sesion|permitir en esta sesión|permitir en esta sesion"
    "|permitir durante esta sesión|permitir para esta sesión|permitir toda la sesión|en esta sesión|siempre esta sesión"
    "|siempre en esta sesión|siempre en esta sesion|permitir siempre en esta sesión|permitir siempre esta sesión"
    "|на эту сессию|на этот сеанс|в этом сеансе|в этой сессии|разрешить на эту сессию|разрешить на этот сеанс"
    "|разрешить на сеанс|разрешить в этой сессии|разрешить в этом сеансе|разрешить до конца сеанса|разрешить до конца сессии"
    "|разрешать в этом сеансе|всегда в этом сеансе|всегда в этой сессии|всегда разрешать в этом сеансе"
)
_DENY: Final = (
    "deny|deny it|denied|no|n|nope|no thanks|no thank you|reject|reject it|rejected|refuse|decline|disallow|don't|dont|do not"
    "|don't allow|do not allow|don't do it|do not do it|don't do that|not allowed"
    "|拒绝|不|不允许|不行|不可以|不同意|不批准|不要|否|禁止|别|不好"
    "|拒絕|不允許|不核准|不准|別"
    "|拒否|拒否する|拒否します|いいえ|だめ|ダメ|駄目|だめです|ダメです|許可しない|許可しません|却下|却下する|やめて|やめてください|不許可|承認しない"
    "|ปฏิเสธ|ไม่|ไม่ครับ|ไม่ค่ะ|ไม่อนุญาต|ไม่ใช่|ไม่ได้|ไม่เอา|อย่า|อย่าทำ|ห้าม"
    "|từ chối|không|không cho phép|không được|không đồng ý|đừng|đừng làm|thôi"
    "|denegar|denegado|deniego|no permitir|no lo permitas|no lo hagas|rechazar|rechazado|rechazo|negar"
    "|нет|отклонить|отклоняю|отклонено|отказать|отказ|отказываю|запретить|запрещаю|не разрешать|не разрешаю|нельзя"
    "|не надо|не нужно"
)
_DENY_WHY: Final = (
    "deny and say why|deny and tell why|deny and tell the agent why|deny with reason|deny with a reason|no with a reason"
    "|拒绝并说明原因|拒绝并说明理由|拒絕並說明原因|拒絕並說明理由|理由を伝えて拒否|理由を付けて拒否|拒否して理由を伝える|ปฏิเสธและบอกเหตุผล|ปฏิเสธพร้อมเหตุผล"
    "|từ chối và nêu lý do|từ chối kèm lý do|denegar y decir por qué|denegar y explicar por qué|denegar con motivo"
    "|отклонить и объяснить|отклонить и указать причину|отклонить с причиной"
)
_SKIP: Final = (
    "skip|skip it|skip this|-|–|—|跳过|略过|跳過|略過|スキップ|飛ばす|とばす|ข้าม|bỏ qua|omitir|saltar"
    "|пропустить|пропуск|пропусти"
)
_CANCEL: Final = (
    "cancel|cancel it|abort|取消|放弃|放棄|キャンセル|中止|取り消し|ยกเลิก|hủy|huỷ|hủy bỏ|cancelar|отмена|отменить|отмени"
)
_YES: Final = "true|on|yes|y|1|是|是的|对|對|はい|ええ|ใช่|có|vâng|đúng|sí|si|да|вкл|ok|okay|ตกลง|好|好的"
_NO: Final = "false|off|no|n|0|否|不|不是|いいえ|ไม่|ไม่ใช่|không|sai|нет|выкл"

_BECAUSE: Final = (
    r"because|cause|cuz|since|porque|ya que|puesto que|debido a que|потому что|так как|т\.\s?к\.|поскольку"
    r"|vì|bởi vì|tại vì|do là"
)
"""Words of languages that put spaces between words, so that they end where a word ends."""
_BECAUSE_UNSPACED: Final = (
    "因为|因為|由于|由於|原因是|理由是|原因|理由は|理由|なぜなら|なぜならば|というのも|เพราะว่า|เพราะ|เนื่องจาก|เหตุผลคือ|เหตุผล"
)
_HENCE: Final = "ので|から|ため|為"
"""What ends a reason that stands before the denial, in Japanese."""
_PAUSE: Final = r"\s*+[,.;:!，。、；：！…–—-]*+\s*+"
_REASON: Final = r"\s*+[:,、，：]?\s*+(?P<reason>\S.*)"
"""Blanks are never given back: two runs of them that share a long one out would take its square."""

_CLOSING: Final = " \t\n.,;:!…。、，；：！｡､~～"
_MENTION: Final = re.compile(r"@\S+\s+")
_QUOTES: Final = ('""', "''", "“”", "‘’", "«»", "「」", "『』", "„“", "``")
_NUMBER: Final = re.compile(r"(?:#\s?)?(?P<open>\()?(?P<number>[1-9][0-9]?)\u20e3?(?(open)\)|[.):、。]?)")
_LED: Final = re.compile(
    r"(?:#\s?)?(?P<open>\()?(?P<number>[1-9][0-9]?)\u20e3?(?(open)\)|(?P<mark>[.):、。,-]?))(?P<rest>\s+\S.*|(?<=[:、。)\u20e3])\S.*)",
    re.DOTALL,
)


def plain(text: str) -> str:
    """``text`` as it is compared: no width, no case, no invisible characters, one space between words, one apostrophe."""
    shown = _visible(text)
    return " ".join(shown.replace("’", "'").replace("‘", "'").casefold().split())


def _visible(text: str) -> str:
    """``text`` in its compatibility form, without invisible characters; case and reason stay as they were typed."""
    normal = unicodedata.normalize("NFKC", text)
    return "".join(char for char in normal if unicodedata.category(char) != "Cf" and char != "\ufe0f").strip()


def _bare(text: str) -> str:
    """The comparable form without mention, quotes and closing punctuation."""
    bare = plain(text)
    if match := _MENTION.match(bare):
        bare = bare[match.end() :]
    bare = bare.rstrip(_CLOSING) if bare.strip(_CLOSING + "-–—") else bare
    for pair in _QUOTES:
        if len(bare) > 2 and bare[0] == pair[0] and bare[-1] == pair[1]:
            bare = bare[1:-1].strip(_CLOSING)
    return bare


def forms(text: str) -> frozenset[str]:
    """How ``text`` is compared with a label: two that share a form are the same but for width, case and closing punctuation."""
    return frozenset((plain(text), _bare(text))) - {""}


def same(text: str, label: str) -> bool:
    """Whether ``text`` is ``label``, but for width, case, a mention before it and closing punctuation."""
    return len(text) <= len(label) + limits.INTERACTION_WORD_CHARS and bool(forms(text) & forms(label))


def _words(*listed: str) -> frozenset[str]:
    return frozenset(plain(word) for group in listed for word in group.split("|"))


@functools.cache
def meanings() -> Mapping[str, Meaning]:
    """Every word and label that is one of the four choices, in its comparable form."""
    found: dict[str, Meaning] = {}
    groups: tuple[tuple[Meaning, str], ...] = (
        ("allow_once", _ALLOW),
        ("allow_session", _SESSION),
        ("deny_why", _DENY_WHY),
        ("deny", _DENY),
    )
    for meaning, listed in groups:
        labels = [texts.catalogue(language)[LABELS[meaning]] for language in texts.LANGUAGES]
        for word in _words(listed, *labels):
            found[word] = meaning
    return found


@functools.cache
def _denied_because() -> tuple[re.Pattern[str], ...]:
    denials = sorted((word for word, meaning in meanings().items() if meaning == "deny"), key=len, reverse=True)
    spaced = [re.escape(word).replace("\\ ", "\\s+").replace("'", "['’]") for word in denials]
    no = "|".join(spaced)
    return (
        re.compile(rf"(?:{no})(?!\w){_PAUSE}(?<!\w)(?:{_BECAUSE})(?!\w){_REASON}", re.IGNORECASE | re.DOTALL),
        re.compile(rf"(?:{no}){_PAUSE}(?:{_BECAUSE_UNSPACED}){_REASON}", re.IGNORECASE | re.DOTALL),
        re.compile(rf"(?:{no})\s*+[:：]\s*+(?P<reason>\S.*)", re.IGNORECASE | re.DOTALL),
        re.compile(rf"(?P<reason>.+)(?:{_HENCE})\s*+[、,。]?\s*+(?:{no})[.。!！]*", re.IGNORECASE | re.DOTALL),
    )


@dataclass(frozen=True, slots=True)
class Typed:
    """What a text says about the four choices; ``reason`` only with a denial."""

    meaning: Meaning
    reason: str = ""


def number(text: str) -> int | None:
    """The number that is the whole of ``text``: ``1``, ``１``, ``1️⃣``, ``①``, ``1.``, ``1)``, ``(1)``, ``#1``; else ``None``."""
    if len(text) > limits.INTERACTION_WORD_CHARS:
        return None
    bare = plain(text)
    if match := _MENTION.match(bare):
        bare = bare[match.end() :]
    match = _NUMBER.fullmatch(bare.rstrip("!！ "))
    return int(match["number"]) if match else None


@dataclass(frozen=True, slots=True)
class Numbered:
    """A number and the text behind it; ``marked`` when a colon stands between them."""

    number: int
    rest: str
    marked: bool


def numbered(text: str) -> Numbered | None:
    """The number and the text behind it that ``text`` is (``4 too risky``, ``4: too risky``), or ``None``."""
    match = _LED.fullmatch(_without_mention(text))
    return Numbered(int(match["number"]), match["rest"].strip(), match["mark"] == ":") if match else None


def _without_mention(text: str) -> str:
    shown = _visible(text)
    match = _MENTION.match(shown)
    return shown[match.end() :] if match else shown


def because(text: str) -> str:
    """What follows a word for "because" at the very beginning of ``text``, else nothing."""
    match = re.fullmatch(rf"(?:(?:{_BECAUSE})(?!\w)|(?:{_BECAUSE_UNSPACED})){_REASON}", text, re.IGNORECASE | re.DOTALL)
    return match["reason"].strip() if match else ""


def typed(text: str) -> Typed | None:
    """Which of the four choices the words of ``text`` are, or ``None``."""
    if len(text) <= limits.INTERACTION_WORD_CHARS and (meaning := meanings().get(_bare(text))) is not None:
        return Typed(meaning)
    shown = _without_mention(text)
    for pattern in _denied_because():
        if match := pattern.fullmatch(shown):
            return Typed("deny", match["reason"].strip())
    return None


@functools.cache
def _set(name: Literal["skip", "cancel", "yes", "no"]) -> frozenset[str]:
    listed = {"skip": _SKIP, "cancel": _CANCEL, "yes": _YES, "no": _NO}[name]
    keys = {"skip": "interaction.skip", "cancel": "interaction.cancel", "yes": "interaction.yes", "no": "interaction.no"}
    also = [f"interaction.{name}_word"] if name in ("skip", "cancel") else []
    return _words(listed, *(texts.catalogue(language)[key] for language in texts.LANGUAGES for key in (keys[name], *also)))


def _is(name: Literal["skip", "cancel", "yes", "no"], text: str) -> bool:
    return len(text) <= limits.INTERACTION_WORD_CHARS and (plain(text) in _set(name) or _bare(text) in _set(name))


def skips(text: str) -> bool:
    """Whether ``text`` leaves a field out."""
    return _is("skip", text)


def cancels(text: str) -> bool:
    """Whether ``text`` gives no answer to a question at all."""
    return _is("cancel", text)


def truth(text: str) -> bool | None:
    """The yes or no that ``text`` is, or ``None``."""
    return True if _is("yes", text) else False if _is("no", text) else None


def answer_like(text: str) -> bool:
    """Whether a message looks like a choice: a number from 1 to 9, or words that allow or deny, with or without a reason."""
    counted = number(text)
    return typed(text) is not None if counted is None else counted <= 9
