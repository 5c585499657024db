//! Where arriving transfers and the turns that wait for them meet.
//!
//! A transfer is taken only if a turn announced its id. One that arrives before its turn's request waits,
//! bounded in number and time, with its blocks still in the sender's hands: nothing is read meanwhile.

use std::collections::HashMap;
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
}

#[derive(Debug, Default)]
struct Entries {
    serial: u64,
    early: usize,
    map: HashMap<String, Entry>,
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
            None => {
                entries.map.insert(id.to_owned(), Entry::Announced(serial, claim));
            }
        }
        Ok(Inbound { inbox: self.clone(), id: id.to_owned(), serial, arrivals, verdict: Some(verdict) })
    }

    /// A connection brings this transfer: waits for the turn that announces it.
    ///
    /// # Errors
    /// A sentence: nobody announced it in time, or too many wait already.
    pub async fn claim(self: &Arc<Self>, id: &str) -> Result<Claim, String> {
        let (waiting, place) = {
            let mut entries = self.lock();
            match entries.map.remove(id) {
                Some(Entry::Announced(_, claim)) => return Ok(claim),
                Some(early) => {
                    entries.map.insert(id.to_owned(), early);
                    return Err(format!("transfer {id} is arriving already"));
                }
                None => {}
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
        let claim = timeout(self.early_for, waiting).await;
        drop(place);
        match claim {
            Ok(Ok(claim)) => Ok(claim),
            _ => Err(format!("no turn announced transfer {id}")),
        }
    }

    /// Turns and connections that wait for each other now.
    pub fn waiting(&self) -> usize {
        self.lock().map.len()
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
    use super::*;

    fn inbox() -> Arc<Inbox> {
        Inbox::new(1, Duration::from_secs(10))
    }

    #[tokio::test(start_paused = true)]
    async fn turn_first_or_transfer_first_they_meet() {
        let inbox = inbox();
        let mut turn = inbox.announce("a").unwrap();
        let claim = inbox.claim("a").await.unwrap();
        claim.arrivals.send(Arrival::End).await.unwrap();
        assert!(matches!(turn.next().await, Some(Arrival::End)));
        turn.accept();
        assert_eq!(claim.verdict.await, Ok(Ok(())));

        let (claim, turn) = tokio::join!(inbox.claim("b"), async { inbox.announce("b") });
        turn.unwrap().refuse("no");
        assert_eq!(claim.unwrap().verdict.await, Ok(Err("no".into())));
        assert_eq!(inbox.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn early_arrivals_expire_and_are_bounded() {
        let inbox = inbox();
        let (first, second) = tokio::join!(inbox.claim("a"), inbox.claim("b"));
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
        let claim = inbox.claim("a").await.unwrap();
        drop(turn);
        assert!(claim.verdict.await.is_err());
        drop(inbox.announce("b").unwrap());
        assert_eq!(inbox.waiting(), 0);
    }
}
