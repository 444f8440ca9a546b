"""Sentences of refusals of recipes, overrides and options that cannot be used."""

from abrun.messages.codes import Code
from abrun.messages.message import Message

MAX_NAMED = 100  # characters of the names of further invalid fields
# Allowed values by the type of pydantic's error, which supplies the numbers
ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "{ge} or more",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "number_list_type": "a list of numbers",
    "string_type": "text",
}


MESSAGES: dict[Code, Message] = {
    Code.PROBLEMS_UNREADABLE: "{field}: got {path:repr}, which cannot be read: {problem}; give a JSON-lines "
    "file",
}
