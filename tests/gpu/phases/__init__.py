"""Phases of the suite, by what they are about; `all` names them."""
