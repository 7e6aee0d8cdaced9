//! Proofs that both ends of a call know a shared secret, which is itself never sent.
//!
//! The caller requests a *challenge*, which names its time and is signed with a key of the server's process: the
//! server remembers no challenge that a stranger requested. The caller proves the secret in the metadata of one
//! call by `HMAC-SHA256(secret, "call", path, challenge, nonce)` with a nonce of its own, and the server proves
//! it in its answer by `HMAC-SHA256(secret, "answer", path, challenge, nonce)`. A challenge is valid for one call
//! within [`CHALLENGE_AGE_MAX`]; only challenges that were used with a valid proof are remembered until then.
//!
//! This authenticates the ends of a call, not the bytes in between: on networks that others can read or alter,
//! use TLS in addition.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac as _};
use sha2::Sha256;
use tonic::codegen::http::HeaderMap;
use tonic::metadata::{BinaryMetadataValue, MetadataMap};
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::v1;
use crate::v1::worker_client::WorkerClient;

/// Metadata key of a call's proof.
const METADATA_KEY: &str = "inflight-proof-bin";
/// Maximum age of a challenge.
pub const CHALLENGE_AGE_MAX: Duration = Duration::from_secs(60);
/// Maximum number of used challenges that are remembered; beyond it, calls are rejected until some expire.
const USED_MAX: usize = 65_536;
/// Length of the part of a challenge that is signed: its time in microseconds and random bytes.
const SIGNED_BYTES: usize = 24;
const TAG_BYTES: usize = 16;
/// Length of a challenge in bytes.
const CHALLENGE_BYTES: usize = SIGNED_BYTES + TAG_BYTES;
const NONCE_BYTES: usize = 16;
const PROOF_BYTES: usize = 32;

/// Path of the method that opens a session.
pub const SESSION_PATH: &str = "/inflight.v1.Worker/Session";

/// Rejection of a call's proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProofError {
    /// The call has no proof, or one of the wrong length.
    #[error("the call carries no proof of the shared secret")]
    Missing,
    /// The challenge is not of this process, too old, or was used before.
    #[error("the challenge that the call answers has expired or was used before; request another")]
    Stale,
    /// The proof was made with another secret, or for another path.
    #[error("the proof does not match: caller and server have different secrets")]
    Wrong,
    /// Too many challenges were used within [`CHALLENGE_AGE_MAX`].
    #[error("{USED_MAX} calls were authenticated within the last minute, the limit; try again later")]
    Full,
}

fn mac(secret: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    // HMAC takes keys of any length.
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC accepts keys of any length");
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

/// Returns the bytes of a proof in the headers of a call; a value that is not valid base64 counts as absent.
fn sent_bytes(headers: &HeaderMap) -> Option<Vec<u8>> {
    // `MetadataValue::try_from` would encode the text once more; only a map decodes it.
    let mut metadata = HeaderMap::new();
    metadata.insert(METADATA_KEY, headers.get(METADATA_KEY)?.clone());
    let metadata = MetadataMap::from_headers(metadata);
    Some(metadata.get_bin(METADATA_KEY)?.to_bytes().ok()?.to_vec())
}

/// Proof of one call, at the caller.
#[derive(Clone)]
pub struct CallProof {
    secret: Vec<u8>,
    path: String,
    challenge: Vec<u8>,
    nonce: [u8; NONCE_BYTES],
}

impl std::fmt::Debug for CallProof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallProof").field("path", &self.path).finish_non_exhaustive()
    }
}

impl CallProof {
    /// Answers a server's challenge for one call of `path`, such as `/inflight.v1.Worker/Session`, with the first
    /// secret.
    pub fn new(secrets: &[Vec<u8>], path: &str, challenge: &[u8]) -> Self {
        let nonce = rand::random();
        let secret = secrets.first().cloned().unwrap_or_default();
        Self { secret, path: path.to_owned(), challenge: challenge.to_owned(), nonce }
    }

    /// Adds the proof to the metadata of the call.
    pub fn insert(&self, metadata: &mut MetadataMap) {
        let proof =
            mac(&self.secret, &[b"call", self.path.as_bytes(), &self.challenge, &self.nonce]).finalize();
        let value = [&self.challenge[..], &self.nonce, &proof.into_bytes()].concat();
        metadata.insert_bin(METADATA_KEY, BinaryMetadataValue::from_bytes(&value));
    }

    /// Whether `answer` proves that the server knows the secret too. Takes the same time for all wrong answers.
    pub fn verify_answer(&self, answer: &[u8]) -> bool {
        let parts = [b"answer".as_slice(), self.path.as_bytes(), &self.challenge, &self.nonce];
        mac(&self.secret, &parts).verify_slice(answer).is_ok()
    }
}

/// Failure to prepare a call to a worker.
#[derive(Debug, thiserror::Error)]
pub enum ProveError {
    /// The worker issued no challenge.
    #[error("the worker issued no challenge: {} ({:?})", .0.message(), .0.code())]
    Challenge(Status),
    /// The worker has no secret, so it cannot prove that it belongs to the cluster.
    #[error("the worker has no secret (--secret-file), but its callers were given one")]
    NoSecret,
}

/// Returns `message` as a request to a worker for one call of `path`, with a proof of the first secret; without
/// secrets the request has no proof.
///
/// # Errors
/// [`ProveError`] if the worker does not issue a challenge.
pub async fn prove<T>(
    client: &mut WorkerClient<Channel>,
    secrets: &[Vec<u8>],
    path: &str,
    message: T,
) -> Result<(Request<T>, Option<CallProof>), ProveError> {
    let mut request = Request::new(message);
    if secrets.is_empty() {
        return Ok((request, None));
    }
    let answer = client.challenge(v1::ChallengeRequest {}).await.map_err(ProveError::Challenge)?;
    let challenge = answer.into_inner().challenge;
    if challenge.is_empty() {
        return Err(ProveError::NoSecret);
    }
    let proof = CallProof::new(secrets, path, &challenge);
    proof.insert(request.metadata_mut());
    Ok((request, Some(proof)))
}

/// Answer to a call with a valid proof: the server's proof.
#[derive(Clone, PartialEq, Eq)]
pub struct AnswerProof(pub Vec<u8>);

/// Challenges of a server.
pub struct Challenges {
    /// Key of this process.
    key: [u8; 32],
    started: Instant,
    used: Mutex<UsedChallenges>,
}

/// Challenges that were used, until they expire.
#[derive(Default)]
struct UsedChallenges {
    expiry: BTreeMap<Vec<u8>, Instant>,
    /// In the order of expiry, as all are valid for the same time from their use.
    order: VecDeque<Vec<u8>>,
}

impl Default for Challenges {
    fn default() -> Self {
        Self::new()
    }
}

impl Challenges {
    /// Creates the challenges of a process, with a random key.
    pub fn new() -> Self {
        Self { key: rand::random(), started: Instant::now(), used: Mutex::default() }
    }

    /// Issues a challenge.
    pub fn issue(&self, now: Instant) -> Vec<u8> {
        let micros = now.saturating_duration_since(self.started).as_micros() as u64;
        let random: [u8; SIGNED_BYTES - 8] = rand::random();
        let mut challenge = [&micros.to_le_bytes()[..], &random].concat();
        let tag = mac(&self.key, &[&challenge]).finalize().into_bytes();
        challenge.extend_from_slice(&tag[..TAG_BYTES]);
        challenge
    }

    /// Verifies the proof in the headers of a call of `path` against any of the secrets.
    ///
    /// # Errors
    /// [`ProofError`].
    pub fn verify(
        &self,
        secrets: &[Vec<u8>],
        path: &str,
        headers: &HeaderMap,
        now: Instant,
    ) -> Result<AnswerProof, ProofError> {
        let value = sent_bytes(headers).ok_or(ProofError::Missing)?;
        if value.len() != CHALLENGE_BYTES + NONCE_BYTES + PROOF_BYTES {
            return Err(ProofError::Missing);
        }
        let (challenge, rest) = value.split_at(CHALLENGE_BYTES);
        let (nonce, proof) = rest.split_at(NONCE_BYTES);
        let (signed, tag) = challenge.split_at(SIGNED_BYTES);
        if mac(&self.key, &[signed]).verify_truncated_left(tag).is_err() {
            return Err(ProofError::Stale);
        }
        let micros = signed.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let issued = self.started + Duration::from_micros(micros);
        if now.saturating_duration_since(issued) > CHALLENGE_AGE_MAX {
            return Err(ProofError::Stale);
        }
        let parts = |kind: &'static [u8]| [kind, path.as_bytes(), challenge, nonce];
        let verified = |secret: &&Vec<u8>| mac(secret, &parts(b"call")).verify_slice(proof).is_ok();
        let secret = secrets.iter().find(verified).ok_or(ProofError::Wrong)?;
        self.use_once(challenge, now)?;
        Ok(AnswerProof(mac(secret, &parts(b"answer")).finalize().into_bytes().to_vec()))
    }

    /// Marks a challenge as used.
    fn use_once(&self, challenge: &[u8], now: Instant) -> Result<(), ProofError> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let UsedChallenges { expiry, order } = &mut *used;
        while let Some(first) = order.front()
            && expiry.get(first).is_none_or(|expires| *expires < now)
        {
            expiry.remove(first);
            order.pop_front();
        }
        if expiry.contains_key(challenge) {
            return Err(ProofError::Stale);
        }
        if order.len() >= USED_MAX {
            return Err(ProofError::Full);
        }
        expiry.insert(challenge.to_vec(), now + CHALLENGE_AGE_MAX);
        order.push_back(challenge.to_vec());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = SESSION_PATH;

    fn secrets(names: &[&str]) -> Vec<Vec<u8>> {
        names.iter().map(|name| name.as_bytes().to_vec()).collect()
    }

    fn headers(proof: &CallProof) -> HeaderMap {
        let mut metadata = MetadataMap::new();
        proof.insert(&mut metadata);
        metadata.into_headers()
    }

    #[test]
    fn a_proof_is_valid_once_for_its_path_with_any_secret_of_the_server_until_it_expires() {
        let challenges = Challenges::new();
        let (old, new, both) = (secrets(&["old"]), secrets(&["new"]), secrets(&["new", "old"]));
        let now = Instant::now();
        for (own, servers, expected) in [
            (&old, &both, Ok(())),
            (&new, &both, Ok(())),
            (&both, &new, Ok(())),
            (&both, &old, Err(ProofError::Wrong)),
            (&old, &new, Err(ProofError::Wrong)),
        ] {
            let proof = CallProof::new(own, PATH, &challenges.issue(now));
            let verified = challenges.verify(servers, PATH, &headers(&proof), now);
            assert_eq!(verified.as_ref().map(drop).map_err(|error| *error), expected);
            if let Ok(answer) = verified {
                assert!(proof.verify_answer(&answer.0));
                assert!(!proof.verify_answer(&answer.0[1..]));
                let again = challenges.verify(servers, PATH, &headers(&proof), now);
                assert_eq!(again.err(), Some(ProofError::Stale), "a challenge is used once");
            }
        }
        let proof = CallProof::new(&old, PATH, &challenges.issue(now));
        let other_path = challenges.verify(&old, "/inflight.v1.Worker/Diagnose", &headers(&proof), now);
        assert_eq!(other_path.err(), Some(ProofError::Wrong));
        let late = now + CHALLENGE_AGE_MAX + Duration::from_secs(1);
        assert_eq!(challenges.verify(&old, PATH, &headers(&proof), late).err(), Some(ProofError::Stale));
        let foreign = CallProof::new(&old, PATH, &Challenges::new().issue(now));
        assert_eq!(challenges.verify(&old, PATH, &headers(&foreign), now).err(), Some(ProofError::Stale));
        assert_eq!(challenges.verify(&old, PATH, &HeaderMap::new(), now).err(), Some(ProofError::Missing));
        let short = CallProof::new(&old, PATH, b"short");
        assert_eq!(challenges.verify(&old, PATH, &headers(&short), now).err(), Some(ProofError::Missing));
    }

    #[test]
    fn a_server_that_does_not_know_the_secret_cannot_answer() {
        let challenges = Challenges::new();
        let now = Instant::now();
        let proof = CallProof::new(&secrets(&["secret"]), PATH, &challenges.issue(now));
        let sent = sent_bytes(&headers(&proof)).unwrap();
        assert!(!proof.verify_answer(&sent[sent.len() - PROOF_BYTES..]), "an echo of the proof is no answer");
        assert!(!proof.verify_answer(b""));
    }

    #[test]
    fn used_challenges_are_forgotten_when_they_expire() {
        let challenges = Challenges::new();
        let secrets = secrets(&["secret"]);
        let mut now = Instant::now();
        for _ in 0..300 {
            let proof = CallProof::new(&secrets, PATH, &challenges.issue(now));
            assert!(challenges.verify(&secrets, PATH, &headers(&proof), now).is_ok());
            now += Duration::from_secs(1);
        }
        let used = challenges.used.lock().unwrap();
        assert!(used.order.len() <= 62 && used.expiry.len() == used.order.len(), "{}", used.order.len());
    }
}
