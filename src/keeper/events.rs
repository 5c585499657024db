//! KV events of vLLM and SGLang: what they store and drop, over ZMQ. Three frames a message: topic, `u64` big-endian
//! sequence number, msgpack `[time, events, rank]`. An event is a map with a `type`, or (older builds) an array that
//! begins with it.
//!
//! The engines' block hashes are their own. How many there are is counted: the books at rest never believe in more. With
//! exact tokens they are also known by name ([`Names`]): what the engine drops the books drop. A cleared cache empties them.
//!
//! Messages that were missed are asked for where the engine keeps them (`fleet.kv_replay`).

use std::collections::HashSet;
use std::time::Duration;

use rmpv::Value;
use serde_json::json;
use tokio::time::Instant;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket, ZmqMessage};

use super::Keeper;
use super::names::Names;
use crate::core::types::BlockHash;

/// Between two attempts to reach a publisher.
const RETRY: Duration = Duration::from_secs(1);
/// Between two complaints about silence.
const COMPLAIN: Duration = Duration::from_secs(60);
/// Turns in a row without a message that count as silence. A message may be late, and a turn that fits into blocks
/// already there publishes nothing.
const UNHEARD: u64 = 3;
/// Quiet after which the count of cached blocks is believed.
const SETTLED: Duration = Duration::from_secs(3);
/// Longest wait for missed messages.
const REPLAY: Duration = Duration::from_secs(5);
/// The number of the message behind the last one that is sent again.
const END: u64 = u64::MAX;
/// Deepest nesting that is read.
const DEPTH: usize = 16;

/// What an engine's events have told so far.
#[derive(Debug, Default)]
pub struct Heard {
    seq: Option<u64>,
    /// Hashes of the blocks in its cache, as far as the stream was whole.
    cached: HashSet<u64>,
    /// Tokens of a block.
    block: u64,
    messages: u64,
    stored: u64,
    removed: u64,
    cleared: u64,
    /// Breaks in the sequence. What was missed is not known, so the count begins again with the next clearing or life.
    gaps: u64,
    whole: bool,
    last: Option<Instant>,
    /// Turns that ended since the last message: an engine with turns and no events is silent.
    turns: u64,
    complained: Option<Instant>,
    names: Option<Names>,
}

/// Where an engine publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publisher {
    /// `tcp://host:port`, or `bind:tcp://…` where the publisher connects.
    pub events: String,
    /// Where it answers for past messages.
    pub replay: Option<String>,
}

/// What a message means for the books.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct News {
    /// The cache was cleared.
    pub cleared: bool,
    /// The publisher counts from the beginning again: the engine has started anew.
    pub anew: bool,
}

impl Heard {
    /// Nothing heard, from an engine that has just started: its cache is empty, so the count will be whole.
    pub fn from_start() -> Self {
        Self { whole: true, ..Self::default() }
    }

    /// From now on blocks are known by the names they have in the chains of `model`.
    pub fn name(&mut self, model: &str) {
        self.names = Some(Names::new(model));
    }

    /// The first message that is missing before this one.
    pub fn missing(&self, seq: u64) -> Option<u64> {
        let next = self.seq.map_or(0, |last| last + 1);
        (next < seq).then_some(next)
    }

    /// The router's blocks that the engine has dropped for good.
    pub fn lost(&mut self) -> HashSet<BlockHash> {
        self.names.as_mut().map(Names::lost).unwrap_or_default()
    }

    /// Takes one message.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn take(&mut self, frames: &[&[u8]]) -> Result<News, &'static str> {
        let (seq, batch) = (number(frames)?, frames[2]);
        let batch = rmpv::decode::read_value_with_max_depth(&mut &*batch, DEPTH).map_err(|_| "no msgpack")?;
        let events =
            batch.as_array().and_then(|parts| parts.get(1)?.as_array()).ok_or("a batch without events")?;
        let mut news = News::default();
        match self.seq {
            // A listener that comes late has missed what was before.
            None => self.whole &= seq == 0,
            Some(last) if seq == last + 1 => {}
            Some(last) if seq <= last => {
                if let Some(names) = &mut self.names {
                    names.cleared();
                }
                let names = self.names.take();
                *self = Self { gaps: self.gaps, whole: seq == 0, names, ..Self::default() };
                news.anew = true;
            }
            Some(_) => {
                self.gaps += 1;
                self.whole = false;
            }
        }
        self.seq = Some(seq);
        self.messages += 1;
        self.last = Some(Instant::now());
        self.turns = 0;
        for event in events {
            news.cleared |= self.event(event);
        }
        Ok(news)
    }

    /// Takes one event; returns whether the cache was cleared.
    fn event(&mut self, event: &Value) -> bool {
        let field = |name: &str, place: usize| match event {
            Value::Map(pairs) => {
                pairs.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value)
            }
            Value::Array(parts) => parts.get(place),
            _ => None,
        };
        let list =
            |name, place| field(name, place).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let hashes = || -> Vec<u64> { list("block_hashes", 1).iter().map(digest).collect() };
        match field("type", 0).and_then(Value::as_str) {
            Some("BlockStored") => {
                let hashes = hashes();
                self.block = field("block_size", 4).and_then(Value::as_u64).unwrap_or(self.block);
                self.stored += hashes.len() as u64;
                if let Some(names) = self.names.as_mut().filter(|_| is_plain(event)) {
                    let ids = list("token_ids", 3).iter().filter_map(|id| u32::try_from(id.as_u64()?).ok());
                    let parent = field("parent_block_hash", 2).filter(|hash| !hash.is_nil()).map(digest);
                    names.stored(parent, &hashes, &ids.collect::<Vec<_>>(), self.block as usize);
                }
                self.cached.extend(hashes);
            }
            Some("BlockRemoved") => {
                let hashes = hashes();
                self.removed += hashes.len() as u64;
                for hash in &hashes {
                    self.cached.remove(hash);
                }
                if let Some(names) = &mut self.names {
                    names.removed(hashes.into_iter());
                }
            }
            Some("AllBlocksCleared") => {
                if let Some(names) = &mut self.names {
                    names.cleared();
                }
                self.cached.clear();
                self.cleared += 1;
                self.whole = true;
                return true;
            }
            _ => {}
        }
        false
    }

    /// Tokens in the cache; `None` while the count is not whole.
    pub fn cached_tokens(&self) -> Option<u64> {
        (self.whole && self.seq.is_some()).then_some(self.cached.len() as u64 * self.block)
    }

    /// Tokens in the cache now that all turns' events are in: the stream has spoken since the last turn ended, and has
    /// been quiet for a while. (A message that is late tells of a cache without the blocks of the turns after it.)
    pub fn settled(&self) -> Option<u64> {
        let quiet = self.last.is_some_and(|at| at.elapsed() >= SETTLED);
        self.cached_tokens().filter(|_| quiet && self.turns == 0)
    }

    /// A turn ended: its blocks must have been stored.
    pub fn turn_ended(&mut self) {
        self.turns += 1;
    }

    /// Whether it is time to say that events do not arrive.
    pub fn is_silent(&mut self) -> bool {
        let since = |at: Option<Instant>| at.is_none_or(|at| at.elapsed() >= COMPLAIN);
        let silent = self.turns >= UNHEARD && since(self.last) && since(self.complained);
        if silent {
            self.complained = Some(Instant::now());
        }
        silent
    }

    /// For `/admin/workers`.
    pub fn observe(&self) -> serde_json::Value {
        json!({
            "messages": self.messages,
            "stored": self.stored,
            "removed": self.removed,
            "cleared": self.cleared,
            "gaps": self.gaps,
            "cached_tokens": self.cached_tokens(),
            "named_blocks": self.names.as_ref().map(Names::count),
            "silent_for_turns": self.turns,
        })
    }
}

/// A message's number.
fn number(frames: &[&[u8]]) -> Result<u64, &'static str> {
    let [_, seq, _] = frames else { return Err("a message without three frames") };
    Ok(u64::from_be_bytes((*seq).try_into().map_err(|_| "a sequence number that is none")?))
}

/// Whether stored blocks are those of their tokens alone: of no adapter, without salt, images and the like.
fn is_plain(event: &Value) -> bool {
    let is_none = |value: &Value| match value {
        Value::Array(parts) => parts.iter().all(Value::is_nil),
        value => value.is_nil(),
    };
    match event {
        Value::Map(pairs) => pairs.iter().all(|(key, value)| {
            !matches!(key.as_str(), Some("lora_id" | "lora_name" | "cache_salt" | "extra_keys"))
                || is_none(value)
        }),
        // In their order: adapter, medium, and what later builds have added.
        Value::Array(parts) => parts.iter().skip(5).enumerate().all(|(at, value)| at == 1 || is_none(value)),
        _ => false,
    }
}

/// A block's hash is a number or bytes.
fn digest(hash: &Value) -> u64 {
    match hash {
        Value::Binary(bytes) => xxhash_rust::xxh3::xxh3_64(bytes),
        Value::Integer(number) => number.as_u64().or_else(|| number.as_i64().map(|n| n as u64)).unwrap_or(0),
        other => xxhash_rust::xxh3::xxh3_64(other.to_string().as_bytes()),
    }
}

/// Listens for as long as it is polled.
pub(super) async fn listen(keeper: &Keeper, at: &Publisher) {
    loop {
        if let Err(why) = follow(keeper, at).await {
            tracing::debug!(engine = %keeper.url, ?at, why, "no KV events");
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn follow(keeper: &Keeper, at: &Publisher) -> Result<(), String> {
    let mut socket = SubSocket::new();
    match at.events.strip_prefix("bind:") {
        Some(endpoint) => drop(socket.bind(endpoint).await.map_err(text)?),
        None => socket.connect(&at.events).await.map_err(text)?,
    }
    socket.subscribe("").await.map_err(text)?;
    loop {
        let message = socket.recv().await.map_err(text)?;
        let frames: Vec<&[u8]> = message.iter().map(|frame| &**frame).collect();
        let seq = number(&frames).unwrap_or(0);
        let from = keeper.events().missing(seq);
        if let (Some(from), Some(replay)) = (from, &at.replay) {
            let missed = tokio::time::timeout(REPLAY, past(keeper, replay, from..seq)).await;
            if let Err(why) = missed.unwrap_or_else(|_| Err("no answer".into())) {
                tracing::warn!(engine = %keeper.url, replay, from, to = seq - 1, why, "missed KV events are lost");
            }
        }
        keeper.heard(&frames);
    }
}

/// Takes the messages of these numbers that the engine still has. Later ones follow by themselves.
async fn past(keeper: &Keeper, endpoint: &str, wanted: std::ops::Range<u64>) -> Result<(), String> {
    let mut socket = DealerSocket::new();
    socket.connect(endpoint).await.map_err(text)?;
    let mut ask = ZmqMessage::from(Vec::new());
    ask.push_back(wanted.start.to_be_bytes().to_vec().into());
    socket.send(ask).await.map_err(text)?;
    loop {
        let message = socket.recv().await.map_err(text)?;
        // An empty frame is between the address and the message.
        let frames: Vec<&[u8]> = message.iter().skip(1).map(|frame| &**frame).collect();
        match number(&frames)? {
            END => return Ok(()),
            seq if wanted.contains(&seq) => keeper.heard(&frames),
            _ => {}
        }
    }
}

fn text(error: zeromq::ZmqError) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(events: Vec<Value>) -> Vec<u8> {
        let mut out = Vec::new();
        let batch = Value::Array(vec![Value::F64(1.0), Value::Array(events), Value::Nil]);
        rmpv::encode::write_value(&mut out, &batch).unwrap();
        out
    }

    fn map(kind: &str, hashes: &[Value]) -> Value {
        Value::Map(vec![
            ("type".into(), kind.into()),
            ("block_hashes".into(), Value::Array(hashes.to_vec())),
            ("block_size".into(), 32.into()),
        ])
    }

    fn heard(heard: &mut Heard, seq: u64, events: Vec<Value>) -> Result<News, &'static str> {
        heard.take(&[b"kv", &seq.to_be_bytes(), &batch(events)])
    }

    #[test]
    fn blocks_are_counted_in_both_forms() {
        let mut h = Heard::from_start();
        let bytes = Value::Binary(vec![1, 2, 3]);
        heard(&mut h, 0, vec![map("BlockStored", &[7.into(), bytes.clone()])]).unwrap();
        assert_eq!(h.cached_tokens(), Some(64));
        let hashes = Value::Array(vec![8.into()]);
        let tokens = Value::Array(Vec::new());
        let positional = Value::Array(vec!["BlockStored".into(), hashes, Value::Nil, tokens, 32.into()]);
        heard(&mut h, 1, vec![positional, map("BlockRemoved", &[bytes])]).unwrap();
        assert_eq!((h.cached_tokens(), h.stored, h.removed), (Some(64), 3, 1));
        let cleared = Value::Array(vec!["AllBlocksCleared".into()]);
        assert_eq!(heard(&mut h, 2, vec![cleared]), Ok(News { cleared: true, anew: false }));
        assert_eq!(h.cached_tokens(), Some(0));
    }

    #[test]
    fn a_gap_ends_the_count_and_a_lower_number_is_another_life() {
        let mut h = Heard::from_start();
        heard(&mut h, 0, vec![map("BlockStored", &[1.into()])]).unwrap();
        heard(&mut h, 5, vec![map("BlockStored", &[2.into()])]).unwrap();
        assert_eq!((h.gaps, h.cached_tokens()), (1, None));
        assert_eq!(heard(&mut h, 0, Vec::new()), Ok(News { cleared: false, anew: true }));
        assert_eq!(h.cached_tokens(), Some(0));
        let mut late = Heard::from_start();
        heard(&mut late, 40, vec![map("BlockStored", &[1.into()])]).unwrap();
        assert_eq!(late.cached_tokens(), None);
    }

    #[test]
    fn what_is_no_event_is_said_and_changes_nothing() {
        let mut h = Heard::from_start();
        assert!(h.take(&[b"kv", b"x"]).is_err());
        assert!(h.take(&[b"kv", b"short", &batch(Vec::new())]).is_err());
        assert!(h.take(&[b"kv", &0u64.to_be_bytes(), b"\xc1"]).is_err());
        assert!(h.take(&[b"kv", &0u64.to_be_bytes(), b"\x01"]).is_err());
        assert_eq!((h.messages, h.seq), (0, None));
    }

    /// A message that belongs to the turn before does not make the books forget the turn after.
    #[tokio::test(start_paused = true)]
    async fn the_count_is_believed_when_all_is_in() {
        let mut h = Heard::from_start();
        heard(&mut h, 0, vec![map("BlockStored", &[1.into(), 2.into()])]).unwrap();
        assert_eq!(h.settled(), None, "more may be on the way");
        tokio::time::advance(SETTLED).await;
        assert_eq!(h.settled(), Some(64));
        h.turn_ended();
        assert_eq!(h.settled(), None, "its blocks were not told yet");
        heard(&mut h, 1, vec![map("BlockStored", &[3.into()])]).unwrap();
        tokio::time::advance(SETTLED).await;
        assert_eq!(h.settled(), Some(96));
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_said_once_a_minute() {
        let mut h = Heard::from_start();
        assert!(!h.is_silent(), "without turns there is nothing to say");
        (0..2).for_each(|_| h.turn_ended());
        assert!(!h.is_silent(), "a message may be late");
        h.turn_ended();
        assert!(h.is_silent());
        assert!(!h.is_silent());
        tokio::time::advance(COMPLAIN).await;
        assert!(h.is_silent());
        heard(&mut h, 0, Vec::new()).unwrap();
        tokio::time::advance(2 * COMPLAIN).await;
        assert!(!h.is_silent());
    }
}
