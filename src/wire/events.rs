//! The event stream: what a node holds, as (epoch, seq)-numbered changes after a snapshot.
//!
//! `GET /kvc/events` is an endless body of frames, all numbers little-endian:
//! `u32 length of what follows | u64 epoch | u64 seq | u8 kind | payload`. [`encode`] writes one,
//! [`Decoder`] reads them from chunks cut anywhere. `docs/wire.md` has the payloads.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::core::ledger::{LedgerEvent, LoadReport};
use crate::core::residency::Change;
use crate::core::types::{BlockHash, SessionId, Tokens};

/// Content type of the stream.
pub const CONTENT_TYPE: &str = "application/x-kvc-events";

/// Largest frame a reader accepts unless it says otherwise, in bytes.
pub const MAX_FRAME: usize = 64 << 20;

/// One message of the stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Numbered {
    /// Incarnation of the node.
    pub epoch: u64,
    /// Only changes are counted: 1, 2, 3 … within the epoch. A snapshot and a load carry the seq of the last
    /// change before them. So a reader at `n` accepts changes `n + 1`; anything else is a gap.
    pub seq: u64,
    /// What happened.
    pub event: NodeEvent,
}

/// What a node reports.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeEvent {
    /// Everything it holds: the first message of every stream that cannot go on where the reader was, and
    /// again in mid-stream for a reader that was too slow for the backlog.
    Snapshot(Snapshot),
    /// Changes of its ledger, in order.
    Changes(Vec<LedgerEvent>),
    /// Its load; sent after changes and at least once a second.
    Load(LoadReport),
}

/// Everything a node holds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    /// Sessions with their tokens and chains. Blocks of no session are not kept.
    pub sessions: Vec<(SessionId, Tokens, Vec<BlockHash>)>,
    /// Blocks in its backup tier, in no order.
    pub backups: Vec<BlockHash>,
    /// Load at that moment.
    pub load: LoadReport,
}

/// Why a stream cannot be read on. The connection is of no more use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// A frame is longer than the reader accepts.
    #[error("event frame of {len} bytes, at most {max} are allowed")]
    TooLong {
        /// Announced length.
        len: usize,
        /// The reader's limit.
        max: usize,
    },
    /// A frame ends before its content does.
    #[error("event frame is too short for its {0}")]
    Short(&'static str),
    /// A frame goes on behind its content.
    #[error("{0} bytes behind the content of an event frame")]
    Trailing(usize),
    /// An unknown kind of event or change.
    #[error("unknown event tag {0}")]
    Tag(u8),
    /// A name is not UTF-8.
    #[error("a name in an event frame is not UTF-8")]
    Name,
}

const SNAPSHOT: u8 = 1;
const CHANGES: u8 = 2;
const LOAD: u8 = 3;
const HELD: u8 = 1;
const FREED: u8 = 2;
const LEASE_ENDED: u8 = 3;
const BACKED_UP: u8 = 4;
const BACKUP_DROPPED: u8 = 5;

/// One message as a frame.
pub fn encode(message: &Numbered) -> Bytes {
    let mut out = BytesMut::with_capacity(128);
    out.put_u32_le(0);
    out.put_u64_le(message.epoch);
    out.put_u64_le(message.seq);
    match &message.event {
        NodeEvent::Snapshot(snapshot) => {
            out.put_u8(SNAPSHOT);
            put_load(&mut out, &snapshot.load);
            out.put_u32_le(snapshot.sessions.len() as u32);
            for (session, tokens, chain) in &snapshot.sessions {
                put_str(&mut out, session.as_str());
                out.put_u64_le(*tokens);
                put_hashes(&mut out, chain);
            }
            put_hashes(&mut out, &snapshot.backups);
        }
        NodeEvent::Changes(changes) => {
            out.put_u8(CHANGES);
            out.put_u32_le(changes.len() as u32);
            changes.iter().for_each(|change| put_change(&mut out, change));
        }
        NodeEvent::Load(load) => {
            out.put_u8(LOAD);
            put_load(&mut out, load);
        }
    }
    let len = (out.len() - 4) as u32;
    out[..4].copy_from_slice(&len.to_le_bytes());
    out.freeze()
}

fn put_change(out: &mut BytesMut, change: &LedgerEvent) {
    match change {
        LedgerEvent::Held(change) => {
            out.put_u8(HELD);
            put_str(out, change.session.as_str());
            out.put_u32_le(change.keep);
            out.put_u64_le(change.tokens);
            put_hashes(out, &change.appended);
        }
        LedgerEvent::Freed(blocks) => {
            out.put_u8(FREED);
            put_hashes(out, blocks);
        }
        LedgerEvent::LeaseEnded { request_id } => {
            out.put_u8(LEASE_ENDED);
            put_str(out, request_id);
        }
        LedgerEvent::BackedUp(blocks) => {
            out.put_u8(BACKED_UP);
            put_hashes(out, blocks);
        }
        LedgerEvent::BackupDropped(blocks) => {
            out.put_u8(BACKUP_DROPPED);
            put_hashes(out, blocks);
        }
    }
}

fn put_str(out: &mut BytesMut, text: &str) {
    out.put_u32_le(text.len() as u32);
    out.put_slice(text.as_bytes());
}

fn put_hashes(out: &mut BytesMut, hashes: &[BlockHash]) {
    out.reserve(4 + 8 * hashes.len());
    out.put_u32_le(hashes.len() as u32);
    for hash in hashes {
        out.put_u64_le(hash.0);
    }
}

fn put_load(out: &mut BytesMut, load: &LoadReport) {
    out.put_u64_le(load.k_d);
    out.put_u64_le(load.used);
    out.put_u64_le(load.active);
    out.put_u64_le(load.queued_tokens);
    out.put_u32_le(load.running);
    out.put_u32_le(load.waiting);
}

/// Reads frames from a byte stream cut anywhere. Holds at most one frame and one chunk.
#[derive(Debug)]
pub struct Decoder {
    buffer: BytesMut,
    max: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(MAX_FRAME)
    }
}

impl Decoder {
    /// A reader that refuses frames over `max` bytes.
    pub fn new(max: usize) -> Self {
        Self { buffer: BytesMut::new(), max }
    }

    /// Takes the next piece of the stream.
    pub fn push(&mut self, chunk: &[u8]) {
        self.buffer.extend_from_slice(chunk);
    }

    /// The next whole message, if one has arrived. Call it until it gives `None` after every push.
    ///
    /// # Errors
    /// The stream is not what it should be. Every later call gives an error too, or nothing.
    pub fn next_message(&mut self) -> Result<Option<Numbered>, EventError> {
        let Some(len) = self.buffer.first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        if len > self.max {
            return Err(EventError::TooLong { len, max: self.max });
        }
        if self.buffer.len() < 4 + len {
            return Ok(None);
        }
        self.buffer.advance(4);
        read_message(self.buffer.split_to(len).freeze()).map(Some)
    }
}

fn read_message(mut from: Bytes) -> Result<Numbered, EventError> {
    let epoch = u64_of(&mut from, "epoch")?;
    let seq = u64_of(&mut from, "seq")?;
    let event = match from.try_get_u8().map_err(|_| EventError::Short("kind"))? {
        SNAPSHOT => NodeEvent::Snapshot(read_snapshot(&mut from)?),
        CHANGES => {
            let count = u32_of(&mut from, "changes")?;
            NodeEvent::Changes((0..count).map(|_| read_change(&mut from)).collect::<Result<_, _>>()?)
        }
        LOAD => NodeEvent::Load(read_load(&mut from)?),
        tag => return Err(EventError::Tag(tag)),
    };
    if from.has_remaining() {
        return Err(EventError::Trailing(from.remaining()));
    }
    Ok(Numbered { epoch, seq, event })
}

fn read_snapshot(from: &mut Bytes) -> Result<Snapshot, EventError> {
    let load = read_load(from)?;
    let count = u32_of(from, "sessions")?;
    let sessions = (0..count)
        .map(|_| Ok((SessionId::new(str_of(from)?), u64_of(from, "tokens")?, hashes_of(from)?)))
        .collect::<Result<_, EventError>>()?;
    Ok(Snapshot { sessions, backups: hashes_of(from)?, load })
}

fn read_change(from: &mut Bytes) -> Result<LedgerEvent, EventError> {
    Ok(match from.try_get_u8().map_err(|_| EventError::Short("change"))? {
        HELD => LedgerEvent::Held(Change {
            session: SessionId::new(str_of(from)?),
            keep: u32_of(from, "keep")?,
            tokens: u64_of(from, "tokens")?,
            appended: hashes_of(from)?,
        }),
        FREED => LedgerEvent::Freed(hashes_of(from)?),
        LEASE_ENDED => LedgerEvent::LeaseEnded { request_id: str_of(from)? },
        BACKED_UP => LedgerEvent::BackedUp(hashes_of(from)?),
        BACKUP_DROPPED => LedgerEvent::BackupDropped(hashes_of(from)?),
        tag => return Err(EventError::Tag(tag)),
    })
}

fn read_load(from: &mut Bytes) -> Result<LoadReport, EventError> {
    Ok(LoadReport {
        k_d: u64_of(from, "load")?,
        used: u64_of(from, "load")?,
        active: u64_of(from, "load")?,
        queued_tokens: u64_of(from, "load")?,
        running: u32_of(from, "load")?,
        waiting: u32_of(from, "load")?,
    })
}

fn u32_of(from: &mut Bytes, what: &'static str) -> Result<u32, EventError> {
    from.try_get_u32_le().map_err(|_| EventError::Short(what))
}

fn u64_of(from: &mut Bytes, what: &'static str) -> Result<u64, EventError> {
    from.try_get_u64_le().map_err(|_| EventError::Short(what))
}

fn str_of(from: &mut Bytes) -> Result<String, EventError> {
    let len = u32_of(from, "name")? as usize;
    if from.remaining() < len {
        return Err(EventError::Short("name"));
    }
    String::from_utf8(from.split_to(len).into()).map_err(|_| EventError::Name)
}

/// The count is checked against what is there before anything is allocated for it.
fn hashes_of(from: &mut Bytes) -> Result<Vec<BlockHash>, EventError> {
    let count = u32_of(from, "hashes")? as usize;
    if from.remaining() / 8 < count {
        return Err(EventError::Short("hashes"));
    }
    Ok((0..count).map(|_| BlockHash(from.get_u64_le())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hashes() -> impl Strategy<Value = Vec<BlockHash>> {
        proptest::collection::vec(any::<u64>().prop_map(BlockHash), 0..5)
    }

    fn load() -> impl Strategy<Value = LoadReport> {
        any::<(u64, u64, u64, u64, u32, u32)>().prop_map(
            |(k_d, used, active, queued_tokens, running, waiting)| LoadReport {
                k_d,
                used,
                active,
                queued_tokens,
                running,
                waiting,
            },
        )
    }

    fn session() -> impl Strategy<Value = SessionId> {
        "\\PC{0,6}".prop_map(SessionId::new)
    }

    fn change() -> impl Strategy<Value = LedgerEvent> {
        prop_oneof![
            (session(), any::<u32>(), hashes(), any::<u64>()).prop_map(
                |(session, keep, appended, tokens)| {
                    LedgerEvent::Held(Change { session, keep, appended, tokens })
                }
            ),
            hashes().prop_map(LedgerEvent::Freed),
            hashes().prop_map(LedgerEvent::BackedUp),
            hashes().prop_map(LedgerEvent::BackupDropped),
            "\\PC{0,6}".prop_map(|request_id| LedgerEvent::LeaseEnded { request_id }),
        ]
    }

    fn message() -> impl Strategy<Value = Numbered> {
        let sessions = proptest::collection::vec((session(), any::<u64>(), hashes()), 0..4);
        let event = prop_oneof![
            (sessions, hashes(), load()).prop_map(|(sessions, backups, load)| {
                NodeEvent::Snapshot(Snapshot { sessions, backups, load })
            }),
            proptest::collection::vec(change(), 0..4).prop_map(NodeEvent::Changes),
            load().prop_map(NodeEvent::Load),
        ];
        (any::<u64>(), any::<u64>(), event).prop_map(|(epoch, seq, event)| Numbered { epoch, seq, event })
    }

    proptest! {
        /// Any messages, any cuts: what goes in comes out.
        #[test]
        fn round_trip_over_any_cuts(
            messages in proptest::collection::vec(message(), 1..6), cut in 1usize..40,
        ) {
            let stream: Vec<u8> = messages.iter().flat_map(encode).collect();
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            for chunk in stream.chunks(cut) {
                decoder.push(chunk);
                while let Some(message) = decoder.next_message().unwrap() {
                    seen.push(message);
                }
            }
            prop_assert_eq!(seen, messages);
        }

        /// A frame cut short, its length made to match, is an error and never a panic.
        #[test]
        fn truncated_content_is_an_error(message in message(), part in 0.0f64..1.0) {
            let frame = encode(&message);
            let cut = 4 + ((frame.len() - 4) as f64 * part) as usize;
            let mut bytes = frame[..cut].to_vec();
            bytes[..4].copy_from_slice(&((cut - 4) as u32).to_le_bytes());
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            prop_assert!(decoder.next_message().is_err());
        }

        /// Garbage gives messages, errors or nothing; it never panics and never allocates by its own word.
        #[test]
        fn garbage_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::new(1024);
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next_message() {}
        }
    }

    #[test]
    fn an_oversized_frame_is_refused_before_it_arrives() {
        let mut decoder = Decoder::new(100);
        decoder.push(&101u32.to_le_bytes());
        assert_eq!(decoder.next_message(), Err(EventError::TooLong { len: 101, max: 100 }));
    }
}
