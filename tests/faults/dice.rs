//! The seed's randomness, and what it decides for each message.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// splitmix64.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// `from..to`.
    pub fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from).max(1)
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.next() as usize % from.len()]
    }

    pub fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.range(from, to))
    }
}

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Msg {
    Info,
    Admit,
    Lease,
    Event,
    /// Bytes of a turn's leg, towards the worker.
    Ask,
    /// Bytes of a turn's leg, towards the gateway.
    Answer,
    /// A frame of a KV transfer, either direction.
    Transfer,
}

impl Msg {
    pub fn name(self) -> &'static str {
        ["info", "admit", "lease", "event", "leg request", "leg answer", "transfer"][self as usize]
    }
}

/// What becomes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    Deliver,
    Drop,
    Delay(Duration),
    Duplicate(Duration),
    Reorder,
    /// It has its effect; the reply is lost.
    LoseReply,
    /// It gets through, then the connection breaks.
    CutBehind,
    /// It is lost, and the connection breaks.
    Cut,
    Corrupt,
}

impl Fate {
    fn name(self) -> &'static str {
        match self {
            Self::Deliver => "deliver",
            Self::Drop => "drop",
            Self::Delay(_) => "delay",
            Self::Duplicate(_) => "duplicate",
            Self::Reorder => "reorder",
            Self::LoseReply => "lose reply",
            Self::CutBehind => "cut behind",
            Self::Cut => "cut",
            Self::Corrupt => "corrupt",
        }
    }
}

/// Draws fates, and counts what was drawn.
#[derive(Debug)]
pub struct Dice {
    rng: Mutex<Rng>,
    /// Per mille of messages of each kind that something happens to.
    rates: [u64; 7],
    on: AtomicBool,
    tally: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
}

impl Dice {
    pub fn new(seed: u64, rates: [u64; 7]) -> Self {
        let rng = Mutex::new(Rng::new(seed));
        Self { rng, rates, on: AtomicBool::new(true), tally: Mutex::default() }
    }

    /// From now on everything is delivered.
    pub fn calm(&self) {
        self.on.store(false, Relaxed);
    }

    pub fn count(&self, what: &'static str, how: &'static str) {
        *self.tally.lock().unwrap().entry((what, how)).or_default() += 1;
    }

    pub fn tally(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        self.tally.lock().unwrap().clone()
    }

    pub fn rng<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut self.rng.lock().unwrap())
    }

    /// Whether an event of an earlier epoch comes once more.
    pub fn is_late(&self) -> bool {
        let late =
            self.on.load(Relaxed) && self.rates[Msg::Event as usize] > 0 && self.rng(|rng| rng.chance(30));
        if late {
            self.count(Msg::Event.name(), "of an old epoch");
        }
        late
    }

    pub fn fate(&self, msg: Msg) -> Fate {
        if !self.on.load(Relaxed) {
            return Fate::Deliver;
        }
        let mut rng = self.rng.lock().unwrap();
        if rng.next() % 1000 >= self.rates[msg as usize] {
            return Fate::Deliver;
        }
        let delay = match rng.next() % 8 {
            0 => rng.ms(1000, 8000),
            1..=2 => rng.ms(100, 1500),
            _ => rng.ms(1, 60),
        };
        let fates: &[Fate] = match msg {
            Msg::Info => &[Fate::Drop, Fate::Delay(delay), Fate::Cut],
            Msg::Admit | Msg::Lease => &[
                Fate::Drop,
                Fate::Cut,
                Fate::Delay(delay),
                Fate::Duplicate(delay),
                Fate::Reorder,
                Fate::LoseReply,
                Fate::CutBehind,
            ],
            Msg::Event => &[Fate::Drop, Fate::Cut, Fate::Delay(delay), Fate::Duplicate(delay), Fate::Reorder],
            Msg::Ask | Msg::Answer => &[Fate::Delay(delay), Fate::Cut, Fate::CutBehind, Fate::Delay(delay)],
            Msg::Transfer => &[
                Fate::Drop,
                Fate::Cut,
                Fate::CutBehind,
                Fate::Delay(delay),
                Fate::Duplicate(delay),
                Fate::Reorder,
                Fate::Corrupt,
                Fate::Corrupt,
            ],
        };
        let fate = *rng.pick(fates);
        drop(rng);
        self.count(msg.name(), fate.name());
        fate
    }
}
