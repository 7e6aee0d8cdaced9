//! Ids of tool calls: a pure function of the stream, so that a resumed stream repeats them.

/// Form of ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallIdStyle {
    /// `call_` and 22 letters or digits.
    Prefixed,
    /// Nine letters or digits, which Mistral's templates require.
    Nine,
}

/// Source of the ids of a choice's calls.
#[derive(Debug, Clone, Copy)]
pub struct CallIds {
    stream: u128,
    choice: u32,
    style: CallIdStyle,
}

impl CallIds {
    /// Creates the ids of a choice; `stream` tells apart requests, of one conversation too.
    pub fn new(stream: u128, choice: u32, style: CallIdStyle) -> Self {
        Self { stream, choice, style }
    }

    /// Returns the id of a call.
    pub(crate) fn id(&self, index: u32) -> String {
        const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let mixed = |salt: u64| {
            let (low, high) = (self.stream as u64, (self.stream >> 64) as u64);
            let call = u64::from(self.choice) << 32 | u64::from(index);
            mix(low ^ mix(high ^ mix(call ^ mix(salt))))
        };
        let mut number = u128::from(mixed(0)) << 64 | u128::from(mixed(1));
        let (mut id, digits) = match self.style {
            CallIdStyle::Prefixed => ("call_".to_owned(), 22),
            CallIdStyle::Nine => (String::new(), 9),
        };
        for _ in 0..digits {
            id.push(char::from(DIGITS[(number % 62) as usize]));
            number /= 62;
        }
        id
    }
}

/// Finalizer of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
