//! What residency alone allows: the share of eligible turns that would be Direct with LRU and with Belady's
//! clairvoyant eviction, on the same turns in the same order. No queue, no running turn that cannot be evicted,
//! no shared prefix: caches of sessions that shrink from the tail.

use std::collections::HashMap;

use crate::core::types::Tokens;

/// One turn as a cache sees it.
#[derive(Debug, Clone, Copy)]
pub struct Access {
    /// The live session.
    pub session: usize,
    /// The D that served it.
    pub worker: usize,
    /// Prompt tokens.
    pub input: Tokens,
    /// Of these, left by the session's last turn.
    pub prefix: Tokens,
    /// Prompt and answer.
    pub length: Tokens,
    /// Whether it counts: a measured later turn with an append within `τ_append`.
    pub counts: bool,
}

/// Who gives way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evict {
    /// The least recently used.
    Lru,
    /// The one needed last.
    Belady,
}

/// Direct share in percent of the counted turns, with `pools` caches of `k` tokens; one pool holds all.
pub fn direct_pct(accesses: &[Access], pools: usize, k: Tokens, tau: Tokens, evict: Evict) -> f64 {
    let next = next_uses(accesses);
    let mut caches: Vec<HashMap<usize, (Tokens, usize)>> = vec![HashMap::new(); pools.max(1)];
    let (mut direct, mut counted) = (0u64, 0u64);
    for (i, a) in accesses.iter().enumerate() {
        let pool = if pools > 1 { a.worker.min(pools - 1) } else { 0 };
        let cache = &mut caches[pool];
        let held = cache.get(&a.session).map_or(0, |(held, _)| *held);
        if a.counts {
            counted += 1;
            direct += u64::from(held > 0 && a.input - held.min(a.prefix).min(a.input) <= tau);
        }
        // The larger key gives way first.
        let key = match evict {
            Evict::Lru => usize::MAX - i,
            Evict::Belady => next[i],
        };
        cache.insert(a.session, (a.length, key));
        shrink(cache, a.session, k);
        if pools > 1 {
            for (p, other) in caches.iter_mut().enumerate() {
                if p != pool {
                    other.remove(&a.session);
                }
            }
        }
    }
    100.0 * direct as f64 / counted.max(1) as f64
}

fn shrink(cache: &mut HashMap<usize, (Tokens, usize)>, keep: usize, k: Tokens) {
    let mut total: Tokens = cache.values().map(|(tokens, _)| tokens).sum();
    while total > k {
        let victim = cache.iter().filter(|(s, _)| **s != keep).max_by_key(|(s, (_, key))| (*key, **s));
        let Some((&victim, &(tokens, _))) = victim else { break };
        let cut = tokens.min(total - k);
        total -= cut;
        if cut == tokens {
            cache.remove(&victim);
        } else if let Some((tokens, _)) = cache.get_mut(&victim) {
            *tokens -= cut;
        }
    }
}

fn next_uses(accesses: &[Access]) -> Vec<usize> {
    let mut last: HashMap<usize, usize> = HashMap::new();
    let mut next = vec![usize::MAX; accesses.len()];
    for (i, a) in accesses.iter().enumerate().rev() {
        next[i] = last.insert(a.session, i).unwrap_or(usize::MAX);
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(session: usize) -> Access {
        Access { session, worker: 0, input: 101, prefix: 100, length: 100, counts: true }
    }

    /// Three sessions in turn in a cache for two: LRU never hits, Belady every other time.
    #[test]
    fn belady_beats_lru_on_a_cycle() {
        let turns: Vec<Access> = (0..300).map(|i| access(i % 3)).collect();
        let pct = |evict| direct_pct(&turns, 1, 200, 10, evict);
        assert_eq!(pct(Evict::Lru), 0.0);
        assert!((pct(Evict::Belady) - 49.0).abs() < 2.0, "{}", pct(Evict::Belady));
        assert!((direct_pct(&turns, 1, 300, 10, Evict::Lru) - 99.0).abs() < 0.1);
    }

    /// A cut tail within `τ` is still Direct; a session that moved to another pool is not.
    #[test]
    fn tails_and_pools() {
        let turns = [access(0), access(1), access(0)];
        let pct = |k| direct_pct(&turns, 1, k, 10, Evict::Lru);
        assert!(pct(191) > 33.0 && pct(190) < 1.0);
        let moved = [access(0), Access { worker: 1, ..access(0) }];
        assert_eq!(direct_pct(&moved, 2, 1000, 10, Evict::Lru), 0.0);
        assert_eq!(direct_pct(&moved, 1, 1000, 10, Evict::Lru), 50.0);
    }
}
