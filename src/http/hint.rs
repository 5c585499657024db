//! `x-codex-turn-state`: Codex gives it back within a turn. It says where the turn was, signed, so that a gateway
//! that doesn't know the session (it has just started, or is another one) asks the right worker first. A hint only:
//! what is forged, of another session or another gateway's secret is as good as none.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac};
use sha2::{Digest as _, Sha256};

use crate::core::types::SessionId;

/// The header's name.
pub(super) const HEADER: &str = "x-codex-turn-state";
/// Bytes of a signature that are kept: half, as RFC 2104 has it.
const SIGNATURE: usize = 16;
/// Longest header that is looked at.
const LONGEST: usize = 512;

/// Signs and verifies.
#[derive(Debug, Clone)]
pub struct Hints {
    key: Hmac<Sha256>,
}

/// What a client sent, not verified yet.
#[derive(Debug, Clone, Copy)]
pub struct Hint<'a> {
    hints: &'a Hints,
    token: &'a [u8],
}

impl Hints {
    /// Hints under a secret that all gateways of a fleet share; an empty one is made up.
    pub fn new(secret: &str) -> Self {
        // A key of one block of the hash, whatever the secret's length.
        let mut key = [0; 64];
        match secret {
            "" => rand::fill(&mut key),
            secret => key[..32].copy_from_slice(&Sha256::digest(secret)),
        }
        Self { key: Hmac::new(&key.into()) }
    }

    /// The token of a session's turn at a worker. It shows the worker's name, which answers show anyway.
    pub fn token(&self, session: &SessionId, worker: &str) -> String {
        let signature = Mac::finalize(self.signed(session, worker.as_bytes())).into_bytes();
        let [worker, signature] =
            [worker.as_bytes(), &signature[..SIGNATURE]].map(|part| URL_SAFE_NO_PAD.encode(part));
        format!("{worker}.{signature}")
    }

    /// What a client sent.
    pub fn hint<'a>(&'a self, token: &'a [u8]) -> Hint<'a> {
        Hint { hints: self, token }
    }

    fn signed(&self, session: &SessionId, worker: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.key.clone();
        // The session's name, with its tenant in it, has no zero byte.
        for part in [b"kvc-turn-state/1".as_slice(), session.as_str().as_bytes(), worker] {
            Mac::update(&mut mac, part);
            Mac::update(&mut mac, &[0]);
        }
        mac
    }
}

impl Hint<'_> {
    /// The worker it names, if it was made for this session.
    pub fn worker(&self, session: &SessionId) -> Option<String> {
        let token = std::str::from_utf8(self.token).ok().filter(|token| token.len() <= LONGEST)?;
        let (worker, signature) = token.trim().split_once('.')?;
        let [worker, signature] = [worker, signature].map(|part| URL_SAFE_NO_PAD.decode(part).ok());
        let (worker, signature) = (worker?, signature.filter(|s| s.len() == SIGNATURE)?);
        self.hints.signed(session, &worker).verify_truncated_left(&signature).ok()?;
        String::from_utf8(worker).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_signed_for_the_session_counts() {
        let (hints, session) = (Hints::new("secret"), SessionId::new("0123/thread"));
        let token = hints.token(&session, "d1");
        let worker = |hints: &Hints, token: &str, session: &str| {
            hints.hint(token.as_bytes()).worker(&SessionId::new(session))
        };
        assert_eq!(worker(&hints, &token, "0123/thread").as_deref(), Some("d1"));
        assert_eq!(
            worker(&Hints::new("secret"), &token, "0123/thread").as_deref(),
            Some("d1"),
            "another gateway's"
        );
        assert_eq!(worker(&Hints::new("other"), &token, "0123/thread"), None);
        assert_eq!(worker(&Hints::new(""), &token, "0123/thread"), None);
        assert_eq!(worker(&hints, &token, "0123/other"), None);
        assert_eq!(worker(&hints, &token, "9999/thread"), None, "another tenant's");
        let forged = format!("{}.{}", URL_SAFE_NO_PAD.encode("d2"), token.split_once('.').unwrap().1);
        let (cut, long) = (&token[..token.len() - 2], format!("{token}{}", "A".repeat(600)));
        for bad in [&*forged, cut, &long, "", ".", "d1", "\u{e9}.\u{e9}", &token.replace('.', "..")] {
            assert_eq!(worker(&hints, bad, "0123/thread"), None, "{bad}");
        }
        assert!(!token.contains("thread") && token.len() < 64);
    }
}
