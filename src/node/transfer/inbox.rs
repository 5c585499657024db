//! Where arriving transfers and the turns that wait for them meet.
//!
//! A transfer is taken only if a turn announced its id. One that arrives before its turn's request waits,
//! bounded in number and time, with its blocks still in the sender's hands: nothing is read meanwhile.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::message::{Begin, Blocks};

/// Frames' worth of blocks between the socket and the turn.
const BUFFERED: usize = 4;

/// What a turn gets of its transfer, in order.
#[derive(Debug)]
pub enum Arrival {
    /// It starts.
    Begin(Begin),
    /// Blocks, in order.
    Blocks(Blocks),
    /// That was all: the turn answers with [`Inbound::accept`] or refuses.
    End,
    /// It failed on the way.
    Failed(String),
}

/// The turn's end. Dropping it refuses the transfer.
#[derive(Debug)]
pub struct Inbound {
    inbox: Arc<Inbox>,
    id: String,
    serial: u64,
    arrivals: mpsc::Receiver<Arrival>,
    verdict: Option<oneshot::Sender<Result<(), String>>>,
}

/// The connection's end.
#[derive(Debug)]
pub struct Claim {
    /// Where arrivals go.
    pub arrivals: mpsc::Sender<Arrival>,
    /// The turn's verdict: `Err` at any time, `Ok` after the end. Closed: the turn was cancelled.
    pub verdict: oneshot::Receiver<Result<(), String>>,
}

#[derive(Debug)]
enum Entry {
    /// A turn waits.
    Announced(u64, Claim),
    /// A connection waits.
    Early(u64, oneshot::Sender<Claim>),
    /// A connection waited, and left: its turn need not wait for it.
    Left(u64),
}

#[derive(Debug, Default)]
struct Entries {
    serial: u64,
    early: usize,
    map: HashMap<String, Entry>,
    /// Who left, the first first. As many are remembered as may wait.
    left: VecDeque<(String, u64)>,
}

/// See the module.
#[derive(Debug)]
pub struct Inbox {
    entries: Mutex<Entries>,
    max_early: usize,
    early_for: Duration,
}

impl Inbox {
    /// At most `max_early` transfers wait for their turn, each for at most `early_for`.
    pub fn new(max_early: usize, early_for: Duration) -> Arc<Self> {
        Arc::new(Self { entries: Mutex::default(), max_early, early_for })
    }

    /// A turn waits for this transfer from now on.
    ///
    /// # Errors
    /// A sentence, when another turn waits for the same id.
    pub fn announce(self: &Arc<Self>, id: &str) -> Result<Inbound, String> {
        let (tx, arrivals) = mpsc::channel(BUFFERED);
        let (verdict, rx) = oneshot::channel();
        let claim = Claim { arrivals: tx, verdict: rx };
        let mut entries = self.lock();
        entries.serial += 1;
        let serial = entries.serial;
        match entries.map.remove(id) {
            Some(Entry::Announced(other, claim)) => {
                entries.map.insert(id.to_owned(), Entry::Announced(other, claim));
                return Err(format!("another turn waits for transfer {id}"));
            }
            // A connection that left meanwhile drops the claim, which ends the turn's wait.
            Some(Entry::Early(_, waiting)) => {
                entries.early -= 1;
                drop(waiting.send(claim));
            }
            // As above.
            Some(Entry::Left(_)) => drop(claim),
            None => {
                entries.map.insert(id.to_owned(), Entry::Announced(serial, claim));
            }
        }
        Ok(Inbound { inbox: self.clone(), id: id.to_owned(), serial, arrivals, verdict: Some(verdict) })
    }

    /// A connection brings this transfer: waits for the turn that announces it, no longer than its sender does.
    /// `gone` resolves when the sender has left.
    ///
    /// # Errors
    /// A sentence: the sender left, nobody announced it in time, or too many wait already.
    pub async fn claim(self: &Arc<Self>, id: &str, gone: impl Future<Output = ()>) -> Result<Claim, String> {
        let (waiting, place) = {
            let mut entries = self.lock();
            match entries.map.remove(id) {
                Some(Entry::Announced(_, claim)) => return Ok(claim),
                Some(early @ Entry::Early(..)) => {
                    entries.map.insert(id.to_owned(), early);
                    return Err(format!("transfer {id} is arriving already"));
                }
                Some(Entry::Left(_)) | None => {}
            }
            if entries.early >= self.max_early {
                return Err(format!("{} transfers wait for their turns already", entries.early));
            }
            let (tx, rx) = oneshot::channel();
            entries.early += 1;
            entries.serial += 1;
            let serial = entries.serial;
            entries.map.insert(id.to_owned(), Entry::Early(serial, tx));
            (rx, Place { inbox: self.clone(), id: id.to_owned(), serial })
        };
        let waited = tokio::select! {
            biased;
            claim = timeout(self.early_for, waiting) => claim,
            () = gone => {
                self.leave(id, place.serial);
                return Err(format!("the sender of transfer {id} left"));
            }
        };
        match waited {
            Ok(Ok(claim)) => Ok(claim),
            _ => {
                self.leave(id, place.serial);
                Err(format!("no turn announced transfer {id}"))
            }
        }
    }

    /// Turns and connections that wait for each other now.
    pub fn waiting(&self) -> usize {
        self.lock().map.values().filter(|entry| !matches!(entry, Entry::Left(_))).count()
    }

    /// The connection that made the entry `serial` is gone. A turn that comes now is told at once.
    fn leave(&self, id: &str, serial: u64) {
        let mut entries = self.lock();
        if !matches!(entries.map.get(id), Some(Entry::Early(s, _)) if *s == serial) {
            return;
        }
        entries.map.insert(id.to_owned(), Entry::Left(serial));
        entries.early -= 1;
        entries.left.push_back((id.to_owned(), serial));
        if entries.left.len() > self.max_early
            && let Some((oldest, serial)) = entries.left.pop_front()
            && matches!(entries.map.get(&oldest), Some(Entry::Left(s)) if *s == serial)
        {
            entries.map.remove(&oldest);
        }
    }

    /// Takes out the entry `serial` made, if it is still there.
    fn withdraw(&self, id: &str, serial: u64) {
        let mut entries = self.lock();
        match entries.map.get(id) {
            Some(Entry::Early(s, _)) if *s == serial => {
                entries.map.remove(id);
                entries.early -= 1;
            }
            Some(Entry::Announced(s, _)) if *s == serial => drop(entries.map.remove(id)),
            _ => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An early arrival's place; it leaves when the wait ends, however it ends.
struct Place {
    inbox: Arc<Inbox>,
    id: String,
    serial: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.inbox.withdraw(&self.id, self.serial);
    }
}

impl Inbound {
    /// The next arrival. `None`: the connection is gone without a word.
    pub async fn next(&mut self) -> Option<Arrival> {
        self.arrivals.recv().await
    }

    /// Everything is stored.
    pub fn accept(mut self) {
        if let Some(verdict) = self.verdict.take() {
            drop(verdict.send(Ok(())));
        }
    }

    /// Tells the sender why its transfer is of no use.
    pub fn refuse(mut self, reason: &str) {
        if let Some(verdict) = self.verdict.take() {
            drop(verdict.send(Err(reason.to_owned())));
        }
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        self.inbox.withdraw(&self.id, self.serial);
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    fn inbox() -> Arc<Inbox> {
        Inbox::new(1, Duration::from_secs(10))
    }

    #[tokio::test(start_paused = true)]
    async fn turn_first_or_transfer_first_they_meet() {
        let inbox = inbox();
        let mut turn = inbox.announce("a").unwrap();
        let claim = inbox.claim("a", pending()).await.unwrap();
        claim.arrivals.send(Arrival::End).await.unwrap();
        assert!(matches!(turn.next().await, Some(Arrival::End)));
        turn.accept();
        assert_eq!(claim.verdict.await, Ok(Ok(())));

        let (claim, turn) = tokio::join!(inbox.claim("b", pending()), async { inbox.announce("b") });
        turn.unwrap().refuse("no");
        assert_eq!(claim.unwrap().verdict.await, Ok(Err("no".into())));
        assert_eq!(inbox.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn early_arrivals_expire_and_are_bounded() {
        let inbox = inbox();
        let (first, second) = tokio::join!(inbox.claim("a", pending()), inbox.claim("b", pending()));
        assert!(first.unwrap_err().contains("no turn announced"));
        assert!(second.unwrap_err().contains("wait for their turns already"));
        assert_eq!(inbox.waiting(), 0);
        assert!(inbox.lock().early == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_turn_leaves_nothing_and_closes_the_verdict() {
        let inbox = inbox();
        let turn = inbox.announce("a").unwrap();
        assert!(inbox.announce("a").is_err());
        let claim = inbox.claim("a", pending()).await.unwrap();
        drop(turn);
        assert!(claim.verdict.await.is_err());
        drop(inbox.announce("b").unwrap());
        assert_eq!(inbox.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_sender_that_leaves_early_ends_the_wait_of_both() {
        let inbox = inbox();
        for id in ["a", "b"] {
            assert!(inbox.claim(id, ready(())).await.unwrap_err().contains("left"));
        }
        assert_eq!((inbox.waiting(), inbox.lock().early), (0, 0));
        // Only the last is remembered: one may wait, so one may have left.
        assert!(inbox.announce("b").unwrap().next().await.is_none());
        let forgotten = inbox.announce("a").unwrap();
        assert_eq!(inbox.waiting(), 1);
        drop(forgotten);
        // A sender that comes again is as good as new.
        assert!(inbox.claim("c", ready(())).await.is_err());
        let (claim, turn) = tokio::join!(inbox.claim("c", pending()), async { inbox.announce("c") });
        assert!(claim.is_ok() && turn.is_ok());
        assert!(inbox.lock().map.is_empty());
    }
}
