//! `GET /kvc/events?epoch=E&after=SEQ`: snapshot, then changes, then load.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream;
use http::{Response, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use tokio::time::{Instant, timeout_at};

use crate::watch::Follower;
use crate::wire::events::{CONTENT_TYPE, NodeEvent, Numbered, encode};

use super::super::builtin::engine::Engine;
use super::super::error::NodeError;
use super::{App, Body, response};

/// Longest silence on a stream.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Shortest time between two loads with no change of what is held between them.
const LOAD_EVERY: Duration = Duration::from_millis(10);

struct Reader {
    engine: Arc<Engine>,
    changes: Follower<u64>,
    /// The reader has everything up to here; `None` = nothing yet.
    after: Option<u64>,
    /// When the last piece was sent.
    sent: Option<Instant>,
}

/// Opens a stream. It resumes after `after` when the reader was in this epoch and the backlog reaches back.
pub fn stream(app: &App, query: Option<&str>) -> Result<Response<Body>, NodeError> {
    let (epoch, after) = (number(query, "epoch")?, number(query, "after")?);
    let after = after.filter(|_| epoch == Some(app.engine.epoch));
    let engine = app.engine.clone();
    let reader = Reader { changes: engine.changes(), engine, after, sent: None };
    let body = StreamBody::new(stream::unfold(reader, |mut reader| async move {
        let piece = reader.next().await;
        Some((Ok::<_, io::Error>(Frame::data(piece)), reader))
    }));
    Ok(response(StatusCode::OK, CONTENT_TYPE, body.boxed_unsync()))
}

impl Reader {
    async fn next(&mut self) -> Bytes {
        if let Some(sent) = self.sent {
            self.due(sent).await;
        }
        let epoch = self.engine.epoch;
        let (seq, events, load) = self.engine.with(|s, _| {
            let seq = s.log.seq();
            let events = self.after.and_then(|after| s.log.since(after));
            (seq, events.ok_or_else(|| s.snapshot()), s.load())
        });
        let mut piece = BytesMut::new();
        match events {
            Ok(frames) => frames.iter().for_each(|frame| piece.extend_from_slice(frame)),
            Err(snapshot) => {
                let event = NodeEvent::Snapshot(snapshot);
                piece.extend_from_slice(&encode(&Numbered { epoch, seq, event }));
            }
        }
        piece.extend_from_slice(&encode(&Numbered { epoch, seq, event: NodeEvent::Load(load) }));
        (self.after, self.sent) = (Some(seq), Some(Instant::now()));
        piece.freeze()
    }

    /// Waits until there is something to say: changes at once, another load soon, else a heartbeat.
    async fn due(&mut self, sent: Instant) {
        let mut until = sent + HEARTBEAT;
        while timeout_at(until, self.changes.changed()).await.is_ok() {
            if self.after != Some(self.engine.with(|s, _| s.log.seq())) {
                return;
            }
            until = sent + LOAD_EVERY;
        }
    }
}

fn number(query: Option<&str>, name: &str) -> Result<Option<u64>, NodeError> {
    let pairs = query.unwrap_or_default().split('&');
    let value = pairs.filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name);
    let Some((_, value)) = value else { return Ok(None) };
    value.parse().map(Some).map_err(|_| NodeError::bad_request(format!("`{name}` must be a whole number")))
}
