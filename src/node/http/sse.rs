//! A streamed answer.

use std::io;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;

use super::super::builtin::decode::Decoding;
use super::Body;
use super::answer::Shape;
use crate::prompt::BYTES_PER_TOKEN;

struct Stream {
    shape: Shape,
    turn: Decoding,
    include_usage: bool,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Role,
    Text,
    Over,
}

/// The answer as server-sent events. The turn is committed before its last event is sent, so whoever has read
/// the end finds the session's KV there; it is cancelled when the body is dropped before.
pub fn body(shape: Shape, turn: Decoding, include_usage: bool) -> Body {
    let state = Stream { shape, turn, include_usage, stage: Stage::Role };
    StreamBody::new(stream::unfold(state, |mut state| async move {
        let piece = state.next().await?;
        Some((piece.map(|text| Frame::data(Bytes::from(text))), state))
    }))
    .boxed_unsync()
}

impl Stream {
    async fn next(&mut self) -> Option<io::Result<String>> {
        match self.stage {
            Stage::Role => {
                self.stage = Stage::Text;
                match self.shape.role() {
                    Some(role) => Some(Ok(role)),
                    None => Some(self.text().await),
                }
            }
            Stage::Text => Some(self.text().await),
            Stage::Over => None,
        }
    }

    /// One event per token, all that are due in one piece.
    async fn text(&mut self) -> io::Result<String> {
        match self.turn.next().await.map_err(io::Error::other)? {
            Some(tokens) => tokens
                .chunks(BYTES_PER_TOKEN)
                .map(|token| std::str::from_utf8(token).map(|token| self.shape.text(token)))
                .collect::<Result<String, _>>()
                .map_err(io::Error::other),
            None => {
                self.stage = Stage::Over;
                Ok(self.end())
            }
        }
    }

    fn end(&self) -> String {
        let mut end = self.shape.finish(&self.turn);
        if self.include_usage {
            end += &self.shape.last(&self.shape.usage(&self.turn));
        }
        end + "data: [DONE]\n\n"
    }
}
