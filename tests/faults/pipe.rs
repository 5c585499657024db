//! A connection in memory: two flows of bytes with latency, which the network can hold, break or garble.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes};
use kvc_router::net::Hangup;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::dice::{Fate, Msg};
use super::net::{Host, Net};

/// Bytes that may lie in a flow.
const ROOM: usize = 128 << 10;
/// Bytes of a KV frame around its payload.
const FRAME: usize = 12 + 8;

/// What both ends of a connection share.
#[derive(Debug)]
pub struct Line {
    pub a: Host,
    pub b: Host,
    pub number: u64,
    kv: bool,
    broken: AtomicBool,
    flows: [Flow; 2],
}

#[derive(Debug, Default)]
struct Flow(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<(Option<Instant>, Bytes)>,
    bytes: usize,
    closed: bool,
    deaf: bool,
    /// What is written gets nowhere: the connection is about to break.
    lost: bool,
    last: Option<Instant>,
    /// A KV frame in the making.
    partial: Vec<u8>,
    /// A frame that was overtaken waits for the next one.
    held_back: Option<Bytes>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl State {
    fn wake(&mut self) {
        self.reader.take().into_iter().for_each(Waker::wake);
        self.writer.take().into_iter().for_each(Waker::wake);
    }

    fn put(&mut self, at: Instant, bytes: Bytes) {
        let at = self.last.map_or(at, |last| last.max(at));
        self.last = Some(at);
        self.bytes += bytes.len();
        self.queue.push_back((Some(at), bytes));
        self.reader.take().into_iter().for_each(Waker::wake);
    }
}

impl Line {
    pub fn open(net: &Arc<Net>, a: Host, b: Host, kv: bool) -> (End, End) {
        let number = net.number();
        let flows = [Flow::default(), Flow::default()];
        let line = Arc::new(Self { a, b, number, kv, broken: AtomicBool::new(false), flows });
        net.register(&line);
        (End::new(net, &line, 0), End::new(net, &line, 1))
    }

    /// As a reset: what was not read is lost, both ends see it.
    pub fn break_off(&self) {
        if !self.broken.swap(true, Relaxed) {
            self.wake();
        }
    }

    pub fn wake(&self) {
        self.flows.iter().for_each(|flow| flow.0.lock().unwrap().wake());
    }

    pub fn touches(&self, host: Host) -> bool {
        self.a == host || self.b == host
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct End {
    net: Arc<Net>,
    line: Arc<Line>,
    /// The flow this end writes to.
    side: usize,
    timer: Option<Pin<Box<Sleep>>>,
    /// The leg a gateway's end carries.
    leg: Option<u64>,
    fresh: bool,
}

impl End {
    fn new(net: &Arc<Net>, line: &Arc<Line>, side: usize) -> Self {
        Self { net: net.clone(), line: line.clone(), side, timer: None, leg: None, fresh: false }
    }

    fn out(&self) -> &Flow {
        &self.line.flows[self.side]
    }

    fn reset() -> io::Error {
        io::ErrorKind::ConnectionReset.into()
    }

    fn send(&mut self, bytes: Bytes, msg: Msg) {
        let (net, line) = (self.net.clone(), self.line.clone());
        net.message(msg, line.number, bytes.len() as u64);
        let fate = net.dice.fate(msg);
        let now = Instant::now() + net.latency(line.a, line.b);
        let mut state = self.out().0.lock().unwrap();
        if state.lost {
            return;
        }
        match fate {
            Fate::Delay(by) => state.put(now + by, bytes),
            Fate::Duplicate(_) => {
                state.put(now, bytes.clone());
                state.put(now, bytes);
            }
            Fate::Reorder => state.held_back = Some(bytes),
            Fate::Corrupt => {
                let mut bad = bytes.to_vec();
                let at = net.dice.rng(|rng| rng.next()) as usize % bad.len();
                bad[at] ^= 0x20;
                state.put(now, bad.into());
            }
            Fate::Cut | Fate::CutBehind => {
                let through = fate == Fate::CutBehind;
                if through {
                    state.put(now, bytes);
                }
                state.lost = true;
                drop(state);
                net.cut_soon(&line, if through { now } else { Instant::now() });
                return;
            }
            Fate::Drop => {}
            _ => state.put(now, bytes),
        }
        if fate != Fate::Reorder
            && let Some(overtaken) = state.held_back.take()
        {
            state.put(now, overtaken);
        }
    }

    /// A gateway's end looks at what it carries: whose turn, and what the worker says to it.
    fn look(&mut self, bytes: &[u8]) {
        if self.side == 0 && !self.line.kv && self.line.a.is_gateway() && bytes.starts_with(b"POST ") {
            self.leg = self.net.leg_begins(self.line.a, self.line.b, bytes, self.leg);
            self.fresh = true;
        }
    }

    fn hear(&mut self, bytes: &[u8]) {
        if self.leg.is_some() && std::mem::take(&mut self.fresh) && bytes.starts_with(b"HTTP/1.1 ") {
            let status = std::str::from_utf8(&bytes[9..12]).ok().and_then(|s| s.parse().ok()).unwrap_or(0);
            if self.net.leg_answers(self.leg, status) {
                self.leg = None;
            }
        }
    }
}

impl Hangup for End {
    async fn hung_up(&self) {
        std::future::poll_fn(|cx| {
            let mut state = self.line.flows[1 - self.side].0.lock().unwrap();
            if self.line.broken.load(Relaxed) || (state.closed && !self.net.is_held(self.line.a, self.line.b))
            {
                return Poll::Ready(());
            }
            state.reader = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl AsyncRead for End {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let line = this.line.clone();
        let mut state = line.flows[1 - this.side].0.lock().unwrap();
        if line.broken.load(Relaxed) {
            return Poll::Ready(Err(Self::reset()));
        }
        state.reader = Some(cx.waker().clone());
        if this.net.is_held(line.a, line.b) {
            return Poll::Pending;
        }
        let Some((due, bytes)) = state.queue.front_mut() else {
            return if state.closed { Poll::Ready(Ok(())) } else { Poll::Pending };
        };
        if let Some(at) = *due
            && at > Instant::now()
        {
            let mut timer = Box::pin(sleep_until(at));
            if timer.as_mut().poll(cx).is_pending() {
                this.timer = Some(timer);
                return Poll::Pending;
            }
        }
        *due = None;
        let n = bytes.len().min(buf.remaining());
        this.hear(&bytes[..n]);
        buf.put_slice(&bytes[..n]);
        bytes.advance(n);
        if bytes.is_empty() {
            state.queue.pop_front();
        }
        state.bytes -= n;
        state.writer.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.line.broken.load(Relaxed) {
            return Poll::Ready(Err(Self::reset()));
        }
        let frames = {
            let mut state = this.out().0.lock().unwrap();
            if state.deaf {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            if state.bytes >= ROOM {
                state.writer = Some(cx.waker().clone());
                return Poll::Pending;
            }
            if this.line.kv {
                state.partial.extend_from_slice(buf);
                Some(whole_frames(&mut state.partial))
            } else {
                None
            }
        };
        match frames {
            Some(frames) => frames.into_iter().for_each(|frame| this.send(frame, Msg::Transfer)),
            None => {
                this.look(buf);
                let msg = if this.side == 0 { Msg::Ask } else { Msg::Answer };
                this.send(Bytes::copy_from_slice(buf), msg);
            }
        }
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.out().0.lock().unwrap();
        state.closed = true;
        state.wake();
        Poll::Ready(Ok(()))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        for (side, flow) in self.line.flows.iter().enumerate() {
            let mut state = flow.0.lock().unwrap();
            if side == self.side {
                state.closed = true;
            } else {
                state.deaf = true;
            }
            state.wake();
        }
        self.net.leg_ends(self.leg);
    }
}

fn whole_frames(partial: &mut Vec<u8>) -> Vec<Bytes> {
    let mut frames = Vec::new();
    while partial.len() >= FRAME {
        let length = u32::from_le_bytes([partial[8], partial[9], partial[10], partial[11]]) as usize;
        let whole = FRAME + length;
        if partial.len() < whole {
            break;
        }
        let rest = partial.split_off(whole);
        frames.push(std::mem::replace(partial, rest).into());
    }
    frames
}
