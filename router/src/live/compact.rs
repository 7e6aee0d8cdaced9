//! Parts of pages without what only their readers need: indentation, comments, blanks beside signs. No string and no comment of a part
//! spans lines.

/// Signs of a script with blanks that have no meaning. Plus and minus keep theirs: `a - -b` is not `a--b`.
const SCRIPT_SIGNS: [&str; 28] = [
    "{ ", " {", "} ", " }", "; ", " : ", ": ", ", ", " = ", " => ", " === ", " !== ", " && ", " || ", " ? ",
    " ?? ", "( ", " < ", " > ", " <= ", " >= ", " * ", " += ", " -= ", " ??= ", " ||= ", " % ", " | ",
];
/// Signs of a style sheet with blanks that have no meaning.
const STYLE_SIGNS: [&str; 7] = ["{ ", " {", "; ", ": ", ", ", " }", " > "];

/// Returns the lines of a part without indentation, empty lines and lines of comments.
fn lines(source: &str) -> impl Iterator<Item = &str> {
    let is_comment = |line: &str| line.starts_with("//") || (line.starts_with("/*") && line.ends_with("*/"));
    source.lines().map(str::trim).filter(move |line| !line.is_empty() && !is_comment(line))
}

/// Returns markup in fewer bytes.
pub(super) fn markup(source: &str) -> String {
    lines(source).flat_map(|line| [line, "\n"]).collect()
}

/// Returns a script in fewer bytes.
pub(super) fn script(source: &str) -> String {
    let mut script = String::new();
    for line in lines(source) {
        // A regular expression, a comment or a template within a template: such a line stays as it is.
        let is_plain = !line.contains(['/', '\'', '\\']) && matches!(line.matches('`').count(), 0 | 2);
        let dense = is_plain.then(|| without_blanks(line, &SCRIPT_SIGNS)).flatten();
        script.push_str(dense.as_deref().unwrap_or(line));
        // A statement may end with its line elsewhere.
        if dense.is_none() || !line.ends_with([';', '{', ',']) {
            script.push('\n');
        }
    }
    script
}

/// Returns a style sheet in fewer bytes.
pub(super) fn style(source: &str) -> String {
    let dense = |line: &str| without_blanks(line, &STYLE_SIGNS).unwrap_or_else(|| line.to_owned());
    lines(source).flat_map(|line| [dense(line).replace(";}", "}"), "\n".to_owned()]).collect()
}

/// Returns a line without the blanks beside signs outside of its strings; `None` if a string does not end.
fn without_blanks(line: &str, signs: &[&str]) -> Option<String> {
    let mut dense = String::new();
    let mut rest = line;
    while let Some(start) = rest.find(['"', '`']) {
        let quote = rest[start..].chars().next()?;
        let end = start + 1 + rest[start + 1..].find(quote)? + 1;
        dense.push_str(&replaced(&rest[..start], signs));
        dense.push_str(&rest[start..end]);
        rest = &rest[end..];
    }
    dense.push_str(&replaced(rest, signs));
    Some(dense)
}

fn replaced(code: &str, signs: &[&str]) -> String {
    signs.iter().fold(code.to_owned(), |code, sign| code.replace(sign, sign.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_and_expressions_keep_their_blanks() {
        for (source, dense) in [
            ("  const a = b ? c : d;\n\n  // e\n  f({ g, h: i });\n", "const a=b?c:d;f({g,h:i});"),
            (
                "if (a && b) {\n  c(\"d = e, f\", `g : ${h}`);\n}\n",
                "if (a&&b){c(\"d = e, f\",`g : ${h}`);}\n",
            ),
            ("a = b - -c;\nd = /e = f/;\n", "a=b - -c;d = /e = f/;\n"),
            ("a(`b, ${c ? `d, e` : \"\"}`);\n", "a(`b, ${c ? `d, e` : \"\"}`);\n"),
            ("a\n  + \"b\"\n", "a\n+ \"b\"\n"),
        ] {
            assert_eq!(script(source), dense);
        }
        let sheet = "  a, b > c { d: e(f, g); h: i }\n  j::after { content: \"; \"; }\n/* k */\n";
        assert_eq!(style(sheet), "a,b>c{d:e(f,g);h:i}\nj::after{content:\"; \"}\n");
    }
}
