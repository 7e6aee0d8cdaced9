//! Parts of calls, which the parsers of every format emit.

/// Maximum bytes of a tool's name.
pub(crate) const NAME_BYTES_MAX: usize = 256;

/// Part of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallPart {
    Begin(String),
    Arguments(String),
    /// The call is whole: its arguments are a JSON object.
    End,
    /// The output ended within the call, or it turned out to be malformed.
    Cut,
}

/// Result of a symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// More follows.
    More,
    /// The call, or the last one of a list, is complete with this symbol.
    Done,
    /// The text is no call, or none any more.
    Invalid,
}
