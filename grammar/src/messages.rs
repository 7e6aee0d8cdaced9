//! Errors of the compiler in terms of the schema: what was wrong, and what to do.

/// Alternatives that may hold together.
pub(crate) const ONE_OF: &str = "oneOf has alternatives that a value may match together, which cannot be enforced; give each a required \
    property with another constant or another type, or use anyOf";

/// Grammar that exceeds the limits of the compiler.
const TOO_LARGE: &str = "the grammar is too large; use fewer properties and alternatives, and shorter patterns and counted repetitions";

/// Parts of a message of the compiler: what stands before, between and behind its variable parts, of which there are two at most.
type Parts = (&'static str, &'static str, &'static str);

/// Messages of the compiler, and sentences in which `{0}` and `{1}` stand for the variable parts.
const SENTENCES: [(Parts, &str); 29] = [
    (("oneOf constraints are not supported", "", ""), ONE_OF),
    (
        ("min/maxProperties only supported", "", ""),
        "minProperties and maxProperties cannot be enforced beside optional properties; require the \
        properties, or forbid others by additionalProperties and let the count be 1",
    ),
    (
        ("patternProperty regexes ", " and ", " are not disjoint"),
        "a name may match both {0} and {1} of patternProperties, which cannot be \
        enforced; let no name match two of them",
    ),
    (
        ("can't determine if patternProperty regexes ", " and ", " are disjoint"),
        "whether a name may match both {0} and {1} of \
        patternProperties takes too much work to find out; use simpler patterns",
    ),
    (
        ("Unable to determine if regex is empty", "", ""),
        "whether any string matches the pattern, format and length together takes too much \
        work to find out; use a simpler pattern, or fewer of them",
    ),
    (
        ("circular references with sibling keys are not supported: ", "", ""),
        "$ref {0} leads back to itself beside other keywords, which cannot \
        be enforced; let it stand alone",
    ),
    (
        ("Reference segment '", "' not found in '", "'"),
        "$ref {1} leads to nothing: the schema has no {0} there",
    ),
    (("Reference segment '", "", "' not found"), "a $ref leads to nothing: the schema has no {0} there"),
    (
        ("Only absolute $ref's (#/...) are supported", "ref '", "'"),
        "$ref {1} cannot be followed; write a pointer, #/..., to a part without an \
        $id of its own",
    ),
    (("Definition not found: ", "", ""), "$ref {0} leads to nothing"),
    (
        ("Invalid type: ", "", ""),
        "type is {0}; the types are null, boolean, integer, number, string, array and object",
    ),
    (("Expected f64 for '", "', got ", ""), "{0} must be a number, not {1}"),
    (("Expected string for '", "', got ", ""), "{0} must be a string, not {1}"),
    (("Expected array for '", "', got ", ""), "{0} must be an array, not {1}"),
    (("Expected object for '", "', got ", ""), "{0} must be an object, not {1}"),
    (("Expected positive integer for '", "', got ", ""), "{0} must be an integer from 0 on, not {1}"),
    (
        ("schema must be an object or boolean", "", ""),
        "the JSON schema has a part that must be a schema, an object or a boolean, and is not",
    ),
    (
        ("schema too large", "", ""),
        "the JSON schema is too large once its references and alternatives are combined; simplify it",
    ),
    (
        ("Schema intersection stack level exceeded", "", ""),
        "the JSON schema combines schemas that lead to each other without an end; simplify it",
    ),
    (
        ("lookarounds not supported", "", ""),
        "a pattern has ^ or $ within, or \\b or \\B, which cannot be enforced; anchor the whole pattern",
    ),
    (
        ("Failed to generate regex for ", "", ""),
        "the bounds of a number cannot be enforced together; use bounds that are apart and within ±10^18",
    ),
    (("initial lexer configuration (grammar) too big", "", ""), TOO_LARGE),
    (("grammar size (number of symbols) too big", "", ""), TOO_LARGE),
    (("lexer precomputation failed", "", ""), TOO_LARGE),
    (("DNF too large", "", ""), TOO_LARGE),
    (("fuel exhausted", "", ""), TOO_LARGE),
    (
        ("lexer error: too many expressions", "", ""),
        "too much work; use simpler patterns, shorter counted repetitions and smaller multipleOf",
    ),
    (
        ("Unsatisfiable schema: Regex is empty", "", ""),
        "the JSON schema or a part behind a $ref allows no value: no string has the pattern, format and length together",
    ),
    (("Unsatisfiable schema: ", "", ""), "the JSON schema or a part behind a $ref allows no value: {0}"),
];

/// Begin of an error of a schema in a Lark grammar.
const IN_LARK: &str = "failed to compile JSON schema: ";

/// Returns an error of the compiler as a sentence of our own, where it is known.
pub(crate) fn translated(reason: &str) -> String {
    // Behind the first line stands where in the grammar it is, in lines that the client has not written.
    let schema = reason.split_once(IN_LARK).map(|(_, reason)| reason);
    let reason = schema.map_or(reason, |schema| schema.lines().next().unwrap_or_default());
    if let Some(keywords) = reason.strip_prefix("Unimplemented keys: ") {
        let keywords: Vec<String> =
            serde_json::from_str(keywords.lines().next().unwrap_or_default()).unwrap_or_default();
        return format!("{} cannot be enforced here; leave it out", keywords.join(", "));
    }
    if let Some((_, error)) =
        reason.split_once("regex parse error:").filter(|_| schema.is_some() || !reason.starts_with("at "))
    {
        let error = error.lines().rev().find_map(|line| line.trim().strip_prefix("error: "));
        return format!("a pattern cannot be used: {}", error.unwrap_or("it is malformed"));
    }
    for ((before, between, behind), sentence) in SENTENCES {
        let Some((first, second)) = parts(reason, before, between, behind) else { continue };
        return sentence.replace("{0}", first).replace("{1}", second);
    }
    reason.to_owned()
}

/// Returns the variable parts of a message.
fn parts<'a>(reason: &'a str, before: &str, between: &str, behind: &str) -> Option<(&'a str, &'a str)> {
    let rest = reason.strip_prefix(before)?;
    let (first, rest) = if between.is_empty() { (rest, rest) } else { rest.split_once(between)? };
    let end = if behind.is_empty() { rest.lines().next().map_or(0, str::len) } else { rest.find(behind)? };
    let second = &rest[..end];
    Some((if between.is_empty() { second } else { first }, second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_in_terms_of_the_schema() {
        for (reason, expected) in [
            ("oneOf constraints are not supported. Enable 'x' option", ONE_OF),
            (
                "at 1(8): failed to compile JSON schema: Unimplemented keys: [\"contains\", \"uniqueItems\"]\n   1 | start: %json {}\n",
                "contains, uniqueItems cannot be enforced here; leave it out",
            ),
            (
                "Reference segment 'a' not found in '#/$defs/a'.",
                "$ref #/$defs/a leads to nothing: the schema has no a there",
            ),
            ("Reference segment 'a' not found.", "a $ref leads to nothing: the schema has no a there"),
            (
                "Expected string for 'pattern', got 1\n  while processing #/$defs/a",
                "pattern must be a string, not 1",
            ),
            (
                "Unsatisfiable schema: Regex is empty: (a&b)",
                "the JSON schema or a part behind a $ref allows no value: no string has the pattern, format and length together",
            ),
            (
                "Unsatisfiable schema: schema is false",
                "the JSON schema or a part behind a $ref allows no value: schema is false",
            ),
            (
                "regex parse error:\n    a\\pX\n    ^\nerror: Unicode property not found",
                "a pattern cannot be used: Unicode property not found",
            ),
            (
                "at 3(1): rule \"a\" not found\n  1 | start: a",
                "at 3(1): rule \"a\" not found\n  1 | start: a",
            ),
        ] {
            assert_eq!(translated(reason), expected, "{reason}");
        }
    }
}
