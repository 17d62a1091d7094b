"""Forms and the JSON records that they make, drawn by a seed.

Every token of an answer follows from its form: keys and brackets are fixed for each kind of form,
values are copied. So a model that has learned the forms can foresee an answer of any length. Drafts
are judged by the target's own text, which may copy a value wrongly. Nothing here is from elsewhere.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

SPLITS = ("train", "align", "test")
"""Parts of the forms: for the target, for its drafters, and for tests; no form is in two."""
_FIRST = (
    *("Ada", "Amir", "Anna", "Ben", "Carla", "Chen", "Clara", "David", "Elena", "Emma", "Felix"),
    *("Grace", "Hana", "Hugo", "Ines", "Ivan", "Jack", "Jana", "Kofi", "Laura", "Leon", "Lucy"),
    *("Maria", "Mark", "Nina", "Noah", "Omar", "Paul", "Priya", "Rosa", "Sam", "Sara", "Tom"),
)
_LAST = (
    *("Adams", "Baker", "Berg", "Brown", "Cruz", "Davis", "Diaz", "Evans", "Fischer", "Garcia"),
    *("Hall", "Hill", "Ito", "Jones", "Keller", "Khan", "King", "Lee", "Lopez", "Martin", "Meyer"),
    *("Moore", "Novak", "Park", "Patel", "Reed", "Rossi", "Silva", "Smith", "Stone", "Weber"),
)
_CITIES = (
    *("Accra", "Berlin", "Boston", "Cairo", "Chicago", "Delhi", "Dublin", "Geneva", "Hanoi"),
    *("Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Milan", "Oslo", "Paris", "Porto"),
    *("Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Toronto", "Turin", "Vienna", "Zurich"),
)
_STREETS = ("Bridge", "Church", "Garden", "High", "Hill", "Lake", "Market", "Mill", "Park", "River")
_GOODS = ("apple", "bag", "book", "box", "chair", "clock", "cup", "desk", "lamp", "pen", "table")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
_ROOMS = ("single", "double", "family", "twin")
_PARTS = ("sensor", "motor", "pump", "valve", "switch", "filter", "relay")
_SUBJECTS = ("history", "biology", "music", "physics", "chemistry", "art", "law")


class Form(NamedTuple):
    """A form, and the record that it makes.

    Attributes:
        prompt: the form, and the word before the record.
        answer: a space and the record, a JSON object in one line.
    """

    prompt: str
    answer: str


def _name(draw: random.Random) -> str:
    return f"{draw.choice(_FIRST)} {draw.choice(_LAST)}"


def _date(draw: random.Random) -> str:
    return f"{draw.randint(1, 28)} {draw.choice(_MONTHS)}"


def _number(draw: random.Random) -> int:
    return draw.randint(100, 999)


def _order(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    form = {
        "order": _number(draw),
        "date": _date(draw),
        "name": _name(draw),
        "street": f"{draw.randint(1, 99)} {draw.choice(_STREETS)} Street",
        "city": draw.choice(_CITIES),
        "item": draw.choice(_GOODS),
        "price": _number(draw),
    }
    record = {
        "type": "order",
        "order_number": form["order"],
        "order_date": form["date"],
        "customer": {
            "full_name": form["name"],
            "address": {"street": form["street"], "city": form["city"]},
        },
        "items": [{"product": form["item"], "quantity": 1, "price": form["price"]}],
        "total": {"amount": form["price"], "currency": "EUR", "paid": False},
    }
    return form, record


def _booking(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    form = {
        "booking": _number(draw),
        "guest": _name(draw),
        "city": draw.choice(_CITIES),
        "arrival": _date(draw),
        "departure": _date(draw),
        "room": draw.choice(_ROOMS),
    }
    record = {
        "type": "booking",
        "booking_number": form["booking"],
        "guest": {"full_name": form["guest"], "is_adult": True},
        "hotel": {"city": form["city"], "stars": 3, "breakfast_included": True},
        "stay": {"arrival_date": form["arrival"], "departure_date": form["departure"]},
        "room": {"room_type": form["room"], "smoking": False, "notes": None},
    }
    return form, record


def _device(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    form = {
        "device": _number(draw),
        "part": draw.choice(_PARTS),
        "city": draw.choice(_CITIES),
        "checked": _date(draw),
        "by": _name(draw),
        "hours": _number(draw),
    }
    record = {
        "type": "inspection",
        "device": {"device_id": form["device"], "part_name": form["part"], "status": "working"},
        "location": {"city": form["city"], "building": None, "floor": None},
        "inspection": {
            "inspection_date": form["checked"],
            "inspected_by": form["by"],
            "operating_hours": form["hours"],
            "needs_repair": False,
        },
    }
    return form, record


def _student(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    form = {
        "student": _name(draw),
        "number": _number(draw),
        "born": _date(draw),
        "city": draw.choice(_CITIES),
        "subject": draw.choice(_SUBJECTS),
        "tutor": _name(draw),
    }
    record = {
        "type": "student",
        "student_number": form["number"],
        "personal": {
            "full_name": form["student"],
            "date_of_birth": form["born"],
            "place_of_birth": form["city"],
        },
        "studies": {"main_subject": form["subject"], "second_subject": None, "degree": "bachelor"},
        "tutor": {"full_name": form["tutor"], "is_professor": True},
    }
    return form, record


_KINDS: Mapping[str, Callable[[random.Random], tuple[dict[str, Any], dict[str, Any]]]] = {
    "order": _order,
    "booking": _booking,
    "inspection": _device,
    "student": _student,
}


def forms(split: str, number: int) -> Iterator[Form]:
    """Draws forms of every kind in turn.

    Args:
        split: one of `SPLITS`; each has other forms.
        number: how many.

    Yields:
        The forms, the same ones on every machine.
    """
    # A form belongs to the split that its text falls to, so that no two splits share one.
    share = {"train": range(8), "align": range(8, 9), "test": range(9, 10)}[split]
    draw, found = random.Random(f"forms {split}"), 0
    while found < number:
        kind = [*_KINDS][found % len(_KINDS)]
        form, record = _KINDS[kind](draw)
        lines = "".join(f"{key}: {value}\n" for key, value in form.items())
        prompt = f"Form: {kind}\n{lines}Record:"
        if sum(prompt.encode()) % 10 in share:
            found += 1
            yield Form(prompt, f" {json.dumps(record)}")
