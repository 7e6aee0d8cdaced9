//! Parts of calls, which the parsers of every format emit.

/// Maximum bytes of a tool's name.
pub(crate) const NAME_BYTES_MAX: usize = 256;

/// Part of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallPart {
    Begin(String),
    Arguments(String),
    End,
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
