"""The check of the dependencies against the RustSec database of advisories, by cargo-deny and what deny.toml ignores."""

import datetime
import os
import subprocess

import checks
from checks import Failed

# An address that git replaces by the path of a folder: cargo-deny takes addresses with a domain only.
FOLDER_URL = "https://advisories.invalid/advisory-db"
SECTION = "[advisories]\n"


def check(root, deny, folder, days_max, work):
    """Checks Cargo.lock against the database, fetched anew or from a git repository at `folder`, and returns its commit and date."""
    environment = dict(os.environ)
    settings = [f'db-path = "{work}/databases"']
    if folder is not None:
        source = work / "advisory-db"
        # cargo-deny fetches the branch main.
        checks.output_of(["git", "clone", "--quiet", "--depth", "1", f"file://{folder.resolve()}", source])
        checks.output_of(["git", "-C", source, "checkout", "--quiet", "-B", "main"])
        settings.append(f'db-urls = ["{FOLDER_URL}"]')
        environment |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{source}.insteadOf", "GIT_CONFIG_VALUE_0": FOLDER_URL}
    text = (root / "deny.toml").read_text(encoding="utf-8")
    if text.count(SECTION) != 1:
        raise Failed(f"{root / 'deny.toml'} has no section {SECTION.strip()}, or several: leave one there")
    config = work / "deny.toml"
    config.write_text(text.replace(SECTION, SECTION + "".join(f"{line}\n" for line in settings)), encoding="utf-8")
    command = [deny, "--locked", "--color", "never", "--config", config]
    run = lambda *arguments: subprocess.run([*command, *arguments], cwd=root, env=environment, check=False, capture_output=True, text=True)
    fetched = run("fetch", "db")
    if fetched.returncode != 0:
        raise Failed(f"cannot fetch the database of advisories: name a git repository of it by --advisories FOLDER, or release without "
                     f"the check by --without-advisories\n{fetched.stderr.strip()}")
    [database] = (work / "databases").glob("*/.git")
    commit, date = checks.output_of(["git", "-C", database.parent, "log", "-1", "--format=%H %cs"]).split()
    # cargo-deny counts the days since it fetched the database, which may have been old then.
    days = (datetime.date.today() - datetime.date.fromisoformat(date)).days
    if days > days_max:
        raise Failed(f"the database of advisories is of {date}, {days} days old, and {days_max} are the limit: fetch a newer one, or raise "
                     "--advisories-days-max")
    checked = run("check", "--hide-inclusion-graph", "advisories")
    if checked.returncode != 0:
        raise Failed(f"advisories apply to Cargo.lock: update the crates, or ignore an advisory with a reason in deny.toml\n"
                     f"{(checked.stderr + checked.stdout).strip()}")
    return {"checked": True, "database_commit": commit, "database_date": date}
