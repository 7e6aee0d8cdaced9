//! Formats of strings as expressions, by the RFCs that JSON Schema names. Each allows only what the format does, and may leave out its
//! rare forms.

/// Day of a month, leap years included (RFC 3339).
const DATE: &str = concat!(
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
);
/// Time with its offset (RFC 3339), without leap seconds.
const TIME: &str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
/// Host name (RFC 1123), of at most three labels.
const HOST: &str =
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:[.][a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?){0,2}";
/// Characters of the local part of an address (RFC 5321).
const LOCAL: &str = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,16}";
/// Address (RFC 2673).
const IPV4: &str =
    "(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])[.]){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
/// Character of a path (RFC 3986).
const PATH: &str = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})";
/// Character of a host's name in an address (RFC 3986).
const NAME: &str = "(?:[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{2})";

/// Returns the expression of a format; `None` for one that is an annotation.
pub(super) fn pattern(format: &str) -> Option<String> {
    Some(match format {
        "date" => DATE.to_owned(),
        "time" => TIME.to_owned(),
        "date-time" => format!("{DATE}[tT]{TIME}"),
        "duration" => duration(),
        "email" => format!("{LOCAL}(?:[.]{LOCAL}){{0,3}}@{HOST}"),
        "hostname" => HOST.to_owned(),
        "ipv4" => IPV4.to_owned(),
        "ipv6" => ipv6(),
        "uuid" => "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".to_owned(),
        "uri" => uri(),
        "json-pointer" => "(?:/(?:[^~/]|~[01])*)*".to_owned(),
        "relative-json-pointer" => "(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)".to_owned(),
        _ => return None,
    })
}

/// Duration (RFC 3339, appendix A).
fn duration() -> String {
    let time = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)";
    let date = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)";
    format!("P(?:[0-9]+W|{date}(?:{time})?|{time})")
}

/// Address (RFC 4291), without an IPv4 address in it.
fn ipv6() -> String {
    let group = "[0-9a-fA-F]{1,4}";
    let mut forms = vec![
        format!("(?:{group}:){{7}}{group}"),
        format!("(?:{group}:){{1,7}}:"),
        format!(":(?:(?::{group}){{1,7}}|:)"),
    ];
    // Groups before and behind the two colons.
    for before in 1..=6 {
        forms.push(format!("(?:{group}:){{{before}}}(?::{group}){{1,{}}}", 7 - before));
    }
    format!("(?:{})", forms.join("|"))
}

/// URI with its scheme (RFC 3986), without addresses of IPv6.
fn uri() -> String {
    let authority = format!("//(?:(?:{NAME}|:)*@)?{NAME}*(?::[0-9]*)?(?:/{PATH}*)*");
    let path = format!("/(?:{PATH}+(?:/{PATH}*)*)?|{PATH}+(?:/{PATH}*)*");
    let rest = format!("(?:[?](?:{PATH}|[/?])*)?(?:#(?:{PATH}|[/?])*)?");
    format!("[a-zA-Z][a-zA-Z0-9+.-]*:(?:{authority}|{path}|){rest}")
}
