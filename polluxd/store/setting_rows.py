"""Conversion of policy settings between the database and the model.

`polluxd.config.settings` defines which values are allowed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polluxd.config.setting_info import as_json, checked, infos
from polluxd.config.settings import PolicySettings
from polluxd.errors import ConfigError

log = logging.getLogger(__name__)


def setting_to_json(name: str, value: object) -> str:
    """Check a setting's value and return it as JSON text.

    Raises:
        ConfigError: no such setting, or not a value for it.
    """
    return json.dumps(as_json(checked(name, value)), allow_nan=False)


def settings_from_rows(stored: Mapping[str, Any], defaults: PolicySettings) -> PolicySettings:
    """Return the defaults, overridden by what is stored.

    A name that this version does not know is passed over. A value that is out of range (it can be there only if
    somebody wrote to the table past polluxctl) is logged, and the default is in force.
    """
    values = {}
    for info in infos("policy"):
        if info.key in stored:
            try:
                values[info.key] = checked(info.key, stored[info.key])
            except ConfigError as error:
                log.warning("the database holds an unusable value, the default is in force: %s", error)
    return replace(defaults, **values)
