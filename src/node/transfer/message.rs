//! What the frames of a KV connection say.

use bytes::{Buf as _, Bytes};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::core::types::{BlockHash, SessionId};

use super::frame::{Draft, Kind, MAX_PAYLOAD, frame};

/// What both sides of a connection must agree on; checked once per connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`crate::wire::PROTOCOL`].
    pub protocol: u32,
    /// Model whose KV is sent; its name stands for the model's layout.
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Stored KV bytes per token.
    pub kv_bytes_per_token: u32,
    /// Name of the sending node.
    pub from: String,
    /// Its epoch.
    pub epoch: u64,
}

impl Hello {
    /// Why a node that would say `self` cannot take KV from one that says `other`.
    pub fn refusal(&self, other: &Self) -> Option<String> {
        let differs = |what: &str, ours: &dyn std::fmt::Display, theirs: &dyn std::fmt::Display| {
            Some(format!("{what} differs: receiver has {ours}, sender has {theirs}"))
        };
        if self.protocol != other.protocol {
            differs("protocol", &self.protocol, &other.protocol)
        } else if self.model != other.model {
            differs("model", &self.model, &other.model)
        } else if self.block_tokens != other.block_tokens {
            differs("block_tokens", &self.block_tokens, &other.block_tokens)
        } else if self.kv_bytes_per_token != other.kv_bytes_per_token {
            differs("kv_bytes_per_token", &self.kv_bytes_per_token, &other.kv_bytes_per_token)
        } else {
            None
        }
    }
}

/// The receiver's agreement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Epoch of the receiving node.
    pub epoch: u64,
}

/// A transfer starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// Its id, as in both legs' plans.
    pub transfer_id: String,
    /// Epoch of the receiver the sender was welcomed by.
    pub epoch: u64,
    /// First block that is sent.
    pub from_block: u32,
    /// How many are.
    pub blocks: u32,
    /// Blocks of the prompt, from the front, that the sender held before it computed the rest.
    pub held_blocks: u32,
}

/// Why something is not taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refuse {
    /// For people.
    pub reason: String,
}

/// Blocks on their way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocks {
    /// Place of the first in the prompt.
    pub first: usize,
    /// Hash and KV of each.
    pub blocks: Vec<(BlockHash, Bytes)>,
}

/// Blocks a D would push to a P, in the order they are sent: a chain's tail first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// What they are.
    pub head: OfferHead,
    /// Their hashes.
    pub hashes: Vec<BlockHash>,
}

/// The head of an [`Offer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferHead {
    /// Names the push in logs of both sides.
    pub sync_id: u64,
    /// Whose KV it is.
    pub session: SessionId,
    /// Epoch of the receiver the sender was welcomed by.
    pub epoch: u64,
}

/// An offer as a frame: `u32 length of the head | head (JSON) | u64 hash …`.
pub fn offer(head: &OfferHead, hashes: impl ExactSizeIterator<Item = BlockHash>) -> Vec<u8> {
    // As in `json`: cannot fail.
    let head = serde_json::to_vec(head).unwrap_or_default();
    let mut draft = Draft::new(Kind::Offer, 4 + head.len() + 8 * hashes.len());
    draft.put(&(head.len() as u32).to_le_bytes());
    draft.put(&head);
    hashes.for_each(|hash| draft.put(&hash.0.to_le_bytes()));
    draft.finish()
}

/// Most blocks one offer can name.
pub const MAX_OFFER: usize = (MAX_PAYLOAD - 4096) / 8;

/// Reads an offer.
///
/// # Errors
/// A sentence.
pub fn read_offer(mut payload: Bytes) -> Result<Offer, String> {
    let len = payload.try_get_u32_le().map_err(|_| "an offer without a head")? as usize;
    if payload.len() < len || !(payload.len() - len).is_multiple_of(8) {
        return Err("an offer cut short".into());
    }
    let head = from_json("offer", &payload.split_to(len))?;
    let hashes = (0..payload.len() / 8).map(|_| BlockHash(payload.get_u64_le())).collect();
    Ok(Offer { head, hashes })
}

/// Which blocks of an offer are wanted, as a frame: a bit each.
pub fn want(wanted: &[bool]) -> Vec<u8> {
    let mut bits = vec![0u8; wanted.len().div_ceil(8)];
    wanted.iter().enumerate().filter(|(_, w)| **w).for_each(|(i, _)| bits[i / 8] |= 1 << (i % 8));
    frame(Kind::Want, &bits)
}

/// Reads the answer to an offer of `offered` blocks.
///
/// # Errors
/// A sentence, when it is an answer to another one.
pub fn read_want(payload: &[u8], offered: usize) -> Result<Vec<bool>, String> {
    if payload.len() != offered.div_ceil(8) {
        return Err(format!("{} bytes do not answer an offer of {offered} blocks", payload.len()));
    }
    Ok((0..offered).map(|i| payload[i / 8] & (1 << (i % 8)) != 0).collect())
}

/// A JSON message as a frame.
pub fn json(kind: Kind, message: &impl Serialize) -> Vec<u8> {
    // These types have no map keys and no fallible serializers, so this cannot fail; an empty payload would be
    // refused by the other side.
    frame(kind, &serde_json::to_vec(message).unwrap_or_default())
}

/// Reads a JSON message.
///
/// # Errors
/// A sentence that names the message.
pub fn from_json<T: DeserializeOwned>(what: &str, payload: &[u8]) -> Result<T, String> {
    serde_json::from_slice(payload).map_err(|e| format!("malformed {what}: {e}"))
}

/// How many blocks of `block_bytes` fit in one frame. ≥ 1 for every layout a node starts with.
pub const fn per_frame(block_bytes: usize) -> usize {
    (MAX_PAYLOAD - 4) / (block_bytes + 8)
}

/// Blocks as a frame: `u32 place of the first | (u64 hash | KV) …`.
pub fn blocks<'a>(first: usize, blocks: impl ExactSizeIterator<Item = (BlockHash, &'a [u8])>) -> Vec<u8> {
    let mut draft = Draft::new(Kind::Blocks, 4);
    draft.put(&(first as u32).to_le_bytes());
    for (hash, kv) in blocks {
        draft.put(&hash.0.to_le_bytes());
        draft.put(kv);
    }
    draft.finish()
}

/// Reads blocks of `block_bytes`.
///
/// # Errors
/// A sentence, when the payload is not whole blocks.
pub fn read_blocks(mut payload: Bytes, block_bytes: usize) -> Result<Blocks, String> {
    let record = 8 + block_bytes;
    if payload.len() < 4 || !(payload.len() - 4).is_multiple_of(record) {
        return Err(format!("{} bytes are not whole blocks of {record}", payload.len()));
    }
    let first = payload.get_u32_le() as usize;
    let mut blocks = Vec::with_capacity(payload.len() / record);
    while !payload.is_empty() {
        let mut one = payload.split_to(record);
        blocks.push((BlockHash(one.get_u64_le()), one));
    }
    Ok(Blocks { first, blocks })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::transfer::frame::{HEADER, TRAILER};

    fn content(frame: &[u8]) -> Bytes {
        Bytes::from(frame[HEADER..frame.len() - TRAILER].to_vec())
    }

    #[test]
    fn blocks_round_trip_and_refuse_parts() {
        let kv = [[1u8; 16], [2; 16]];
        let sent = blocks(7, kv.iter().enumerate().map(|(i, b)| (BlockHash(i as u64), &b[..])));
        let payload = content(&sent);
        let got = read_blocks(payload.clone(), 16).unwrap();
        assert_eq!((got.first, got.blocks.len(), &got.blocks[1].1[..]), (7, 2, &kv[1][..]));
        assert!(read_blocks(payload.slice(..payload.len() - 1), 16).is_err());
        assert!(read_blocks(payload.slice(..3), 16).is_err());
    }

    #[test]
    fn offers_round_trip_and_refuse_parts() {
        let head = OfferHead { sync_id: 3, session: SessionId::new("s"), epoch: 9 };
        let hashes = [1, 2, 3, 4, 5, 6, 7, 8, 9].map(BlockHash);
        let payload = content(&offer(&head, hashes.into_iter()));
        assert_eq!(read_offer(payload.clone()).unwrap(), Offer { head, hashes: hashes.to_vec() });
        assert!(read_offer(payload.slice(..payload.len() - 1)).is_err());
        assert!(read_offer(payload.slice(..3)).is_err());
        let wanted = [true, false, false, true, false, false, false, false, true];
        let bits = content(&want(&wanted));
        assert_eq!(read_want(&bits, 9).unwrap(), wanted);
        assert!(read_want(&bits, 17).is_err());
    }

    #[test]
    fn hello_names_what_differs() {
        let ours = Hello {
            protocol: 1,
            model: "m".into(),
            block_tokens: 24,
            kv_bytes_per_token: 64,
            from: "d".into(),
            epoch: 1,
        };
        assert_eq!(ours.refusal(&Hello { from: "p".into(), epoch: 9, ..ours.clone() }), None);
        let other = Hello { kv_bytes_per_token: 128, ..ours.clone() };
        assert!(ours.refusal(&other).unwrap().contains("kv_bytes_per_token"));
        assert!(ours.refusal(&Hello { model: "x".into(), ..ours.clone() }).unwrap().contains("model"));
    }
}
