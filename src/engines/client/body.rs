//! A response body, read no faster than it is asked for.

use std::future::Future;
use std::pin::pin;
use std::rc::Weak;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use tokio::io::AsyncReadExt;

use super::Pool;
use super::decode::{Framing, Step};
use super::stream::Stream;

/// Bytes asked from the socket at a time: what one stream holds at most.
const READ: usize = 16 << 10;

/// The body of a response. Dropped before its end, it closes the connection.
#[derive(Debug)]
pub struct Body {
    stream: Option<Stream>,
    buf: BytesMut,
    framing: Framing,
    home: Option<(Weak<Pool>, String)>,
}

/// Why a body broke off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// The connection ended before the body did.
    #[error("closed in the middle of its answer")]
    Closed,
    /// The body's framing is broken.
    #[error("malformed answer: {0}")]
    Malformed(&'static str),
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pool")
    }
}

impl Body {
    pub(super) fn new(
        stream: Stream,
        buf: BytesMut,
        framing: Framing,
        home: Option<(Weak<Pool>, String)>,
    ) -> Self {
        Self { stream: Some(stream), buf, framing, home }
    }

    /// Bytes still to come, where the worker said so.
    pub fn length(&self) -> Option<u64> {
        match self.framing {
            Framing::Length(left) => Some(left),
            _ => None,
        }
    }

    /// The next bytes; `None` at the body's true end, an error when it broke off.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BodyError>>> {
        loop {
            match self.framing.step(&mut self.buf) {
                Ok(Step::Data(data)) => return Poll::Ready(Some(Ok(data))),
                Ok(Step::Done) => {
                    self.release();
                    return Poll::Ready(None);
                }
                Ok(Step::More) => {}
                Err(what) => return self.broken(BodyError::Malformed(what)),
            }
            let Some(stream) = self.stream.as_mut() else { return Poll::Ready(None) };
            self.buf.reserve(READ);
            let read = ready!(pin!(stream.read_buf(&mut self.buf)).poll(cx));
            match (read, &self.framing) {
                (Ok(0), Framing::Close) => {
                    self.stream = None;
                    return Poll::Ready(None);
                }
                (Ok(0) | Err(_), _) => return self.broken(BodyError::Closed),
                (Ok(_), _) => {}
            }
        }
    }

    /// The next bytes, as a future.
    ///
    /// # Errors
    /// When the body broke off.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, BodyError> {
        std::future::poll_fn(|cx| self.poll_chunk(cx)).await.transpose()
    }

    /// The rest of the body when it has at most `limit` bytes; else what came first.
    ///
    /// # Errors
    /// When the body broke off.
    pub async fn read_up_to(&mut self, limit: usize) -> Result<Bytes, BodyError> {
        let mut all = BytesMut::new();
        while let Some(data) = self.chunk().await? {
            all.extend_from_slice(&data);
            if all.len() > limit {
                all.truncate(limit);
                break;
            }
        }
        Ok(all.freeze())
    }

    fn broken(&mut self, error: BodyError) -> Poll<Option<Result<Bytes, BodyError>>> {
        self.stream = None;
        self.framing = Framing::Length(0);
        Poll::Ready(Some(Err(error)))
    }

    fn release(&mut self) {
        let Some(stream) = self.stream.take() else { return };
        let Some((pool, authority)) = self.home.take() else { return };
        if let (Some(pool), true) = (pool.upgrade(), self.buf.is_empty()) {
            pool.put(authority, stream);
        }
    }
}
