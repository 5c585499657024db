//! The sending side of one transfer.

use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::timeout;

use crate::core::types::BlockHash;
use crate::net::{Network, Stream};

use super::frame::{self, Frame, FrameError, Kind};
use super::message::{Begin, Hello, OfferHead, Refuse, Welcome, blocks, from_json, json, offer, read_want};

/// A connection to a receiver that agreed to the handshake.
#[derive(Debug)]
pub struct Outbound {
    stream: BufReader<Stream>,
    epoch: u64,
    patience: Duration,
}

impl Outbound {
    /// Connects and shakes hands; `patience` bounds every step and every silence.
    ///
    /// # Errors
    /// A sentence: not reachable, or what the receiver does not agree with.
    pub async fn connect(
        network: &dyn Network,
        to: &str,
        hello: &Hello,
        patience: Duration,
    ) -> Result<Self, String> {
        let stream = within(patience, "connect", async {
            network.connect(to).await.map_err(|e| format!("KV listener: {e}"))
        })
        .await?;
        let mut outbound = Self { stream: BufReader::new(stream), epoch: 0, patience };
        outbound.write(&json(Kind::Hello, hello)).await?;
        let welcome: Welcome = from_json("welcome", &outbound.expect(Kind::Welcome).await?.payload)?;
        outbound.epoch = welcome.epoch;
        Ok(outbound)
    }

    /// Epoch of the receiver.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Starts a transfer.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn begin(&mut self, begin: &Begin) -> Result<(), String> {
        self.write(&json(Kind::Begin, begin)).await
    }

    /// Sends blocks; `first` is the place of the first in the prompt.
    ///
    /// # Errors
    /// A sentence: why the receiver refused, or that the connection failed.
    pub async fn send<'a>(
        &mut self,
        first: usize,
        batch: impl ExactSizeIterator<Item = (BlockHash, &'a [u8])>,
    ) -> Result<(), String> {
        self.write(&blocks(first, batch)).await
    }

    /// Sends one large block without copying it.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn send_one(&mut self, first: usize, hash: BlockHash, kv: &[u8]) -> Result<(), String> {
        let mut front = [0u8; 12];
        front[..4].copy_from_slice(&(first as u32).to_le_bytes());
        front[4..].copy_from_slice(&hash.0.to_le_bytes());
        let (patience, stream) = (self.patience, &mut self.stream);
        let sent = within(patience, "the receiver takes no more KV", async {
            Ok(frame::write_with(stream, Kind::Blocks, &front, kv).await)
        })
        .await?;
        self.sent(sent).await
    }

    /// Offers blocks to a P; returns which of them it wants.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn offer(
        &mut self,
        head: &OfferHead,
        hashes: impl ExactSizeIterator<Item = BlockHash>,
    ) -> Result<Vec<bool>, String> {
        let offered = hashes.len();
        self.write(&offer(head, hashes)).await?;
        read_want(&self.expect(Kind::Want).await?.payload, offered)
    }

    /// Ends a push; returns what became of it.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn pushed<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, String> {
        self.write(&frame::frame(Kind::End, b"")).await?;
        from_json("ack", &self.expect(Kind::Ack).await?.payload)
    }

    /// Ends the transfer and waits until the receiver has stored all of it.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn finish(&mut self) -> Result<(), String> {
        self.write(&frame::frame(Kind::End, b"")).await?;
        self.expect(Kind::Ack).await.map(drop)
    }

    /// Resolves when the receiver says something or goes away: while blocks are sent that can only be a refusal.
    /// Cancel-safe; [`Self::refusal`] then reads it.
    pub async fn disturbed(&mut self) {
        // An error is read as one by `refusal`.
        self.stream.fill_buf().await.ok();
    }

    /// Why the receiver does not want the transfer.
    pub async fn refusal(&mut self) -> String {
        match timeout(self.patience, frame::read(&mut self.stream)).await {
            Ok(Ok(frame)) => reason(&frame),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the receiver stopped within a sentence".into(),
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let sent = within(self.patience, "the receiver takes no more KV", async {
            Ok(frame::write(&mut self.stream, bytes).await)
        })
        .await?;
        self.sent(sent).await
    }

    async fn sent(&mut self, sent: Result<(), FrameError>) -> Result<(), String> {
        match sent {
            Ok(()) => Ok(()),
            // A receiver that refuses says why before it closes.
            Err(error) => match timeout(self.patience, frame::read(&mut self.stream)).await {
                Ok(Ok(frame)) => Err(reason(&frame)),
                _ => Err(error.to_string()),
            },
        }
    }

    async fn expect(&mut self, kind: Kind) -> Result<Frame, String> {
        let patience = self.patience;
        let frame = within(patience, "the receiver says nothing", async {
            frame::read(&mut self.stream).await.map_err(|e: FrameError| e.to_string())
        })
        .await?;
        if frame.kind == kind { Ok(frame) } else { Err(reason(&frame)) }
    }
}

fn reason(frame: &Frame) -> String {
    match frame.kind {
        Kind::Refuse => match from_json::<Refuse>("refusal", &frame.payload) {
            Ok(refuse) => format!("the receiver refused: {}", refuse.reason),
            Err(malformed) => malformed,
        },
        other => format!("unexpected {other:?} from the receiver"),
    }
}

async fn within<T>(
    patience: Duration,
    what: &str,
    step: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    match timeout(patience, step).await {
        Ok(done) => done,
        Err(_) => Err(format!("{what}: gave up after {} ms", patience.as_millis())),
    }
}
