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
    shape: Box<dyn Shape>,
    turn: Decoding,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Begin,
    Text,
    Over,
}

/// The answer as server-sent events. The turn is committed before its last event is sent, so whoever has read
/// the end finds the session's KV there; it is cancelled when the body is dropped before. `said`: what another worker
/// has sent of it; only the rest is sent.
pub fn body(mut shape: Box<dyn Shape>, turn: Decoding, said: Option<String>) -> Body {
    let mut stage = Stage::Begin;
    if let Some(said) = said {
        // The shape counts and remembers what went before, as if it had sent it.
        shape.begin(&turn);
        tokens(&said).for_each(|token| drop(shape.text(token)));
        stage = Stage::Text;
    }
    let state = Stream { shape, turn, stage };
    StreamBody::new(stream::unfold(state, |mut state| async move {
        let piece = state.next().await?;
        Some((piece.map(|text| Frame::data(Bytes::from(text))), state))
    }))
    .boxed_unsync()
}

impl Stream {
    async fn next(&mut self) -> Option<io::Result<String>> {
        if self.stage == Stage::Begin {
            self.stage = Stage::Text;
            let begin = self.shape.begin(&self.turn);
            if !begin.is_empty() {
                return Some(Ok(begin));
            }
        }
        match self.stage {
            Stage::Over => None,
            _ => Some(self.text().await),
        }
    }

    /// One event per token, all that are due in one piece.
    async fn text(&mut self) -> io::Result<String> {
        match self.turn.next().await.map_err(io::Error::other)? {
            Some(text) => Ok(tokens(&text).map(|token| self.shape.text(token)).collect()),
            None => {
                self.stage = Stage::Over;
                Ok(self.shape.end(&self.turn))
            }
        }
    }
}

/// A text cut into tokens, or a little more where a character would be split.
fn tokens(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let end = (BYTES_PER_TOKEN..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len());
        let (token, rest) = text.split_at(end);
        text = rest;
        (!token.is_empty()).then_some(token)
    })
}
