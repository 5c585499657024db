//! A stream of numbered changes: a snapshot first, then every change in order, and the load after each and at least
//! once a second. For whoever mirrors books, over HTTP or in this process.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::time::{Instant, timeout_at};

use crate::core::ledger::LoadReport;
use crate::watch::Follower;
use crate::wire::events::{NodeEvent, Numbered, Snapshot, encode};

/// Longest silence on a stream.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Shortest time between two loads with no change of what is held between them.
const LOAD_EVERY: Duration = Duration::from_millis(10);

/// Books that can be followed.
pub trait Source {
    /// Counts up with every change.
    fn changes(&self) -> Follower<u64>;
    /// Their epoch, and the seq of the last change.
    fn at(&self) -> (u64, u64);
    /// What a reader lacks that has everything up to `after`.
    fn news(&self, after: Option<u64>) -> News;
}

/// What a reader lacks.
#[derive(Debug)]
pub struct News {
    /// The books' epoch.
    pub epoch: u64,
    /// Seq of the last change in it.
    pub seq: u64,
    /// Encoded changes; or everything, when the backlog does not reach back to where the reader is.
    pub changes: Result<Vec<Bytes>, Snapshot>,
    /// Load now.
    pub load: LoadReport,
}

/// One reader of a source.
#[derive(Debug)]
pub struct Reader<S> {
    source: S,
    changes: Follower<u64>,
    epoch: u64,
    /// The reader has everything up to here; `None` = nothing yet.
    after: Option<u64>,
    /// When the last piece was sent.
    sent: Option<Instant>,
}

impl<S: Source> Reader<S> {
    /// A reader that has everything up to `after` of the source's present epoch.
    pub fn new(source: S, after: Option<u64>) -> Self {
        let (epoch, _) = source.at();
        Self { changes: source.changes(), source, epoch, after, sent: None }
    }

    /// The next piece, as soon as there is something to say. `None`: the epoch is over.
    pub async fn next(&mut self) -> Option<Bytes> {
        if let Some(sent) = self.sent {
            self.due(sent).await;
        }
        let News { epoch, seq, changes, load } = self.source.news(self.after);
        if epoch != self.epoch {
            return None;
        }
        let mut piece = BytesMut::new();
        match changes {
            Ok(frames) => frames.iter().for_each(|frame| piece.extend_from_slice(frame)),
            Err(snapshot) => {
                let event = NodeEvent::Snapshot(snapshot);
                piece.extend_from_slice(&encode(&Numbered { epoch, seq, event }));
            }
        }
        piece.extend_from_slice(&encode(&Numbered { epoch, seq, event: NodeEvent::Load(load) }));
        (self.after, self.sent) = (Some(seq), Some(Instant::now()));
        Some(piece.freeze())
    }

    /// Waits until there is something to say: changes at once, another load soon, else a heartbeat.
    async fn due(&mut self, sent: Instant) {
        let mut until = sent + HEARTBEAT;
        while timeout_at(until, self.changes.changed()).await.is_ok() {
            if (self.epoch, self.after) != (self.source.at().0, Some(self.source.at().1)) {
                return;
            }
            until = sent + LOAD_EVERY;
        }
    }
}
