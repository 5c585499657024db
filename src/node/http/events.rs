//! `GET /kvc/events?epoch=E&after=SEQ`: snapshot, then changes, then load.

use std::io;
use std::sync::Arc;

use futures_util::stream;
use http::{Response, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;

use crate::keeper::feed::{News, Reader, Source};
use crate::watch::Follower;
use crate::wire::events::CONTENT_TYPE;

use super::super::builtin::engine::Engine;
use super::super::error::NodeError;
use super::{App, Body, response};

/// Opens a stream. It resumes after `after` when the reader was in this epoch and the backlog reaches back.
pub fn stream(app: &App, query: Option<&str>) -> Result<Response<Body>, NodeError> {
    let (epoch, after) = (number(query, "epoch")?, number(query, "after")?);
    let after = after.filter(|_| epoch == Some(app.engine.epoch));
    let reader = Reader::new(app.engine.clone(), after);
    let body = StreamBody::new(stream::unfold(reader, |mut reader| async move {
        let piece = reader.next().await?;
        Some((Ok::<_, io::Error>(Frame::data(piece)), reader))
    }));
    Ok(response(StatusCode::OK, CONTENT_TYPE, body.boxed_unsync()))
}

impl Source for Arc<Engine> {
    fn changes(&self) -> Follower<u64> {
        Engine::changes(self)
    }

    fn at(&self) -> (u64, u64) {
        (self.epoch, self.with(|s, _| s.log.seq()))
    }

    fn news(&self, after: Option<u64>) -> News {
        self.with(|s, _| News {
            epoch: self.epoch,
            seq: s.log.seq(),
            changes: after.and_then(|after| s.log.since(after)).ok_or_else(|| s.snapshot()),
            load: s.load(),
        })
    }
}

fn number(query: Option<&str>, name: &str) -> Result<Option<u64>, NodeError> {
    let pairs = query.unwrap_or_default().split('&');
    let value = pairs.filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name);
    let Some((_, value)) = value else { return Ok(None) };
    value.parse().map(Some).map_err(|_| NodeError::bad_request(format!("`{name}` must be a whole number")))
}
