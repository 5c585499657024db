//! `POST /admit_direct_append`: Algorithm 2 as an RPC, and the lease calls.
//!
//! A request body is `u32 LE length of the JSON head | head | appended hashes, u64 LE each`, content type
//! `application/x-kvc-admit`. The chain is sent as *known prefix + appended*: `known` blocks that end in
//! `known_hash`, then the hashes behind them; a node that no longer holds that prefix for the session
//! answers `chain: "resend"` and gets the whole chain (`known = 0`). The answer is JSON.

use serde::{Deserialize, Serialize};

use crate::core::admit::AdmitTerms;
use crate::core::ledger::{AdmitReply, AdmitRequest};
use crate::core::residency::Residency;
use crate::core::types::{BlockHash, Millis, Mode, RejectReason, SessionId, Tokens};

/// JSON head of an Admit request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmitHead {
    /// Idempotency key of the attempt: the same id gets the same answer.
    pub request_id: String,
    /// `s(r)`.
    pub session: SessionId,
    /// `t(r)`.
    pub turn: u32,
    /// `input_len(r)` in tokens.
    pub input_len: Tokens,
    /// The router's estimate of `append_len(r)`; the node recomputes it and its value decides.
    pub append_len: Tokens,
    /// Output tokens to reserve.
    pub output_reserve: Tokens,
    /// Blocks of the chain that are not sent because the node knows them.
    pub known: u32,
    /// Hash of block `known - 1`; absent when `known` is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known_hash: Option<BlockHash>,
}

impl AdmitHead {
    /// The ledger's question: the known part of the chain from what the session holds, then what was sent. `None`: it
    /// does not hold that.
    pub fn request(self, appended: &[BlockHash], held: &Residency) -> Option<AdmitRequest> {
        let known: &[BlockHash] = match self.known_hash {
            None => &[],
            Some(last) => {
                let known = held.get(&self.session)?.chain.get(..self.known as usize)?;
                (known.last() == Some(&last)).then_some(known)?
            }
        };
        Some(AdmitRequest {
            chain: [known, appended].concat().into(),
            request_id: self.request_id,
            session: self.session,
            turn: self.turn,
            input_len: self.input_len,
            output_reserve: self.output_reserve,
        })
    }
}

/// The answer of a node to an Admit request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum AdmitAnswer {
    /// `can_admit = true`.
    Admitted {
        /// The reservation.
        lease: Lease,
        /// Direct, Seed or Reseed.
        mode: Mode,
        /// Blocks of the request's chain that D already holds, from the front.
        reuse_blocks: u32,
        /// What the decision was made from.
        terms: AdmitTerms,
    },
    /// `can_admit = false`.
    Rejected {
        /// Why.
        reason: RejectReason,
        /// What the decision was made from.
        terms: AdmitTerms,
    },
    /// The node does not hold the known prefix: send the whole chain.
    Resend,
    /// The request's id was finished or released before this (late) message arrived.
    Stale,
}

impl AdmitAnswer {
    /// What a ledger of `epoch` replied to `request_id`, at `now`.
    pub fn of(reply: AdmitReply, request_id: &str, epoch: u64, now: Millis) -> Self {
        match reply {
            AdmitReply::Admitted { mode, reuse_blocks, reserved, expires_at, terms } => {
                let ttl_ms = expires_at.saturating_sub(now);
                let lease = Lease { request_id: request_id.to_owned(), epoch, tokens: reserved, ttl_ms };
                Self::Admitted { lease, mode, reuse_blocks, terms }
            }
            AdmitReply::Rejected { reason, terms } => Self::Rejected { reason, terms },
            AdmitReply::Stale => Self::Stale,
        }
    }
}

/// A reservation of KV room at one D.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The request id it was granted for.
    pub request_id: String,
    /// Incarnation of the node that granted it.
    pub epoch: u64,
    /// Tokens it reserves beyond what D already holds.
    pub tokens: Tokens,
    /// Milliseconds until it expires unless the turn begins or it is renewed.
    pub ttl_ms: Millis,
}

/// Body of `POST /kvc/leases/release` and `/kvc/leases/renew`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseCall {
    /// The request id the lease was granted for.
    pub request_id: String,
    /// The epoch it was granted in; a node of another epoch ignores the call.
    pub epoch: u64,
}

/// Content type of an Admit request.
pub const CONTENT_TYPE: &str = "application/x-kvc-admit";

/// Builds an Admit body.
pub fn encode(head: &AdmitHead, appended: &[BlockHash]) -> Result<Vec<u8>, serde_json::Error> {
    let json = serde_json::to_vec(head)?;
    let mut body = Vec::with_capacity(4 + json.len() + 8 * appended.len());
    body.extend_from_slice(&(json.len() as u32).to_le_bytes());
    body.extend_from_slice(&json);
    for hash in appended {
        body.extend_from_slice(&hash.0.to_le_bytes());
    }
    Ok(body)
}

/// Reads an Admit body.
///
/// # Errors
/// A sentence that says what is wrong with the bytes.
pub fn decode(body: &[u8]) -> Result<(AdmitHead, Vec<BlockHash>), String> {
    let (len, rest) = body.split_first_chunk::<4>().ok_or("body shorter than its length field")?;
    let len = u32::from_le_bytes(*len) as usize;
    if rest.len() < len {
        return Err(format!("head of {len} bytes announced, {} bytes follow", rest.len()));
    }
    let (head, hashes) = rest.split_at(len);
    let head: AdmitHead = serde_json::from_slice(head).map_err(|e| format!("head: {e}"))?;
    if hashes.len() % 8 != 0 {
        return Err(format!("{} bytes of hashes are not a multiple of 8", hashes.len()));
    }
    if (head.known == 0) != head.known_hash.is_none() {
        return Err("known and known_hash must go together".into());
    }
    let hashes = hashes
        .chunks_exact(8)
        .filter_map(|c| c.try_into().ok())
        .map(|c| BlockHash(u64::from_le_bytes(c)))
        .collect();
    Ok((head, hashes))
}

/// The form for curl: the whole chain, in JSON.
#[derive(Debug, Deserialize)]
struct PlainAdmit {
    request_id: String,
    session: SessionId,
    #[serde(default)]
    turn: u32,
    input_len: Tokens,
    #[serde(default)]
    append_len: Tokens,
    #[serde(default)]
    output_reserve: Tokens,
    #[serde(default)]
    prefix_hashes: Vec<BlockHash>,
}

/// Reads that form.
///
/// # Errors
/// A sentence that says what is wrong with the body.
pub fn decode_plain(body: &[u8]) -> Result<(AdmitHead, Vec<BlockHash>), String> {
    let plain: PlainAdmit = serde_json::from_slice(body).map_err(|e| e.to_string())?;
    let head = AdmitHead {
        request_id: plain.request_id,
        session: plain.session,
        turn: plain.turn,
        input_len: plain.input_len,
        append_len: plain.append_len,
        output_reserve: plain.output_reserve,
        known: 0,
        known_hash: None,
    };
    Ok((head, plain.prefix_hashes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> AdmitHead {
        AdmitHead {
            request_id: "r1".into(),
            session: SessionId::new("a/b"),
            turn: 3,
            input_len: 100,
            append_len: 4,
            output_reserve: 10,
            known: 2,
            known_hash: Some(BlockHash(u64::MAX)),
        }
    }

    #[test]
    fn round_trip() {
        let hashes = [BlockHash(1), BlockHash(u64::MAX - 1)];
        let body = encode(&head(), &hashes).unwrap();
        assert_eq!(decode(&body).unwrap(), (head(), hashes.to_vec()));
    }

    #[test]
    fn every_truncation_is_an_error_or_shorter() {
        let body = encode(&head(), &[BlockHash(7), BlockHash(8)]).unwrap();
        for cut in 0..body.len() {
            match decode(&body[..cut]) {
                Err(_) => {}
                Ok((h, hashes)) => assert!(h == head() && hashes.len() < 2),
            }
        }
    }
}
