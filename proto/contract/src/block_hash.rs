//! Hash chain over KV blocks, the key of the prefix cache.

use sha2::{Digest, Sha256};

/// Hash of a KV block's tokens and, through the chain, of all tokens before them.
///
/// SHA-256 truncated to 128 bits. The chain is keyed by tenant: a tenant can neither hit the cached blocks of
/// another nor infer from timing that they are cached. Router and worker share this implementation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(u128);

impl BlockHash {
    /// Returns the root of a tenant's hash chains. It excludes model and block size, which are the same for
    /// all blocks of a pool.
    pub fn root(tenant: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"inflight block chain 1");
        hash.update(tenant.as_bytes());
        Self::truncate(hash)
    }

    /// Returns the hash of the block that holds `tokens` and follows the block, or root, `self`.
    pub fn child(self, tokens: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0.to_le_bytes());
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        Self::truncate(hash)
    }

    /// Creates a hash from its 128 bits, for tests and simulations whose blocks have ids instead of tokens.
    pub fn from_raw(raw: u128) -> Self {
        Self(raw)
    }

    /// Returns all 128 bits.
    pub fn raw(self) -> u128 {
        self.0
    }

    /// Returns the low 64 bits, which KV cache events carry: precise enough for a placement hint, at half the
    /// size.
    pub fn short(self) -> u64 {
        self.0 as u64
    }

    /// Extends `chain` to the hashes of all full blocks of `tokens`, of `block_tokens` tokens each.
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
    fn a_block_hash_depends_on_the_whole_prefix_and_the_tenant() {
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
