use sha2::{Digest, Sha256};

/// Names the content of a KV block: its tokens and, through the chain, all tokens before it.
///
/// 128 bits of a SHA-256 chain. The chain starts from a key of the tenant, so that one tenant can neither hit
/// another's blocks nor learn from timing whether they are there. Router and worker both hash here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(u128);

impl BlockHash {
    /// The start of a tenant's chains. Models and block sizes are not part of it: blocks of one pool share both.
    pub fn root(tenant: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"inflight block chain 1");
        hash.update(tenant.as_bytes());
        Self::truncate(hash)
    }

    /// The hash of the block with these tokens, which follows the block (or root) of this hash.
    pub fn child(self, tokens: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0.to_le_bytes());
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        Self::truncate(hash)
    }

    /// A hash for tests and simulations whose blocks have names instead of tokens.
    pub fn from_raw(raw: u128) -> Self {
        Self(raw)
    }

    /// All 128 bits.
    pub fn raw(self) -> u128 {
        self.0
    }

    /// What travels in KV events: enough for a hint, half the bytes.
    pub fn short(self) -> u64 {
        self.0 as u64
    }

    /// Appends the hashes of the full blocks of `tokens` that `chain` does not have yet.
    pub fn extend_chain(chain: &mut Vec<Self>, root: Self, tokens: &[u32], block_tokens: usize) {
        for block in tokens.chunks_exact(block_tokens).skip(chain.len()) {
            let parent = chain.last().copied().unwrap_or(root);
            chain.push(parent.child(block));
        }
    }

    fn truncate(hash: Sha256) -> Self {
        let digest = hash.finalize();
        let mut half = [0; 16];
        half.copy_from_slice(&digest[..16]);
        Self(u128::from_le_bytes(half))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_names_the_whole_prefix_and_its_tenant() {
        let chain = |tenant: &str, tokens: &[u32]| {
            let mut chain = Vec::new();
            BlockHash::extend_chain(&mut chain, BlockHash::root(tenant), tokens, 2);
            chain
        };
        let a = chain("a", &[1, 2, 3, 4, 5]);
        assert_eq!(a.len(), 2, "a block that is not full has no hash");
        assert_eq!(a[..1], chain("a", &[1, 2, 9, 9])[..1]);
        assert_ne!(a[1], chain("a", &[9, 9, 3, 4])[1], "equal blocks behind different prefixes differ");
        assert_ne!(a[0], chain("b", &[1, 2])[0]);
        let mut grown = chain("a", &[1, 2, 3]);
        BlockHash::extend_chain(&mut grown, BlockHash::root("a"), &[1, 2, 3, 4, 5], 2);
        assert_eq!(grown, a);
    }
}
