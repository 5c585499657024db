//! The P side of the fleet: queue, batches, its own cache and host memory.

use super::fleet::{Fleet, Tick};
use super::job::JobId;
use crate::core::cost::Backup;
use crate::core::ledger::LedgerEvent;
use crate::core::options::D2pTrigger;
use crate::core::sync::{Reseed, SyncRule, staleness};
use crate::core::types::{Tokens, WorkerId};

impl Fleet {
    pub(super) fn enter_prefill(&mut self, job: JobId, p: usize) {
        let held = self.held_p(p, job);
        let j = &mut self.jobs[job];
        j.backlog = j.input.saturating_sub(held);
        self.ps[p].backlog += j.backlog;
        self.ps[p].queue.push_back(job);
        self.next_batch(p);
    }

    /// Tokens of a prompt that a P holds, host memory included.
    pub fn held_p(&self, p: usize, job: JobId) -> Tokens {
        let chain = &self.jobs[job].chain;
        let pool = self.ps[p].ledger.residency().prefix(chain);
        (pool + self.ps[p].host.run(&chain[pool..])) as Tokens * self.block()
    }

    /// Fills and starts P's next batch.
    pub(super) fn next_batch(&mut self, p: usize) {
        if !self.ps[p].batch.is_empty() {
            return;
        }
        let (mut ms, mut tokens, now) = (0.0, 0, self.now_ms());
        let block = self.block();
        while let Some(&job) = self.ps[p].queue.front() {
            let chain = self.jobs[job].chain.clone();
            let pool = self.ps[p].ledger.residency().prefix(&chain);
            let hosted = self.ps[p].host.run(&chain[pool..]);
            let held = ((pool + hosted) as Tokens * block).min(self.jobs[job].input - 1);
            let new = self.jobs[job].input - held;
            if !self.ps[p].batch.is_empty() && tokens + new > self.lab.batch_tokens {
                break;
            }
            let request = self.request(job, format!("p{job}"), 0);
            if self.ps[p].ledger.force(&request, now).is_err() {
                break;
            }
            self.keep_evicted_p(p);
            self.ps[p].host.touch(&chain[pool..pool + hosted]);
            tokens += new;
            ms += self.cost.prefill_ms(held, new) + self.cost.host_ms(hosted as Tokens * block);
            if !self.ps[p].batch.is_empty() {
                ms -= self.cost.prefill_fixed;
            }
            let j = &mut self.jobs[job];
            (j.computed_p, j.held_p) = (new, held);
            let worker = &mut self.ps[p];
            worker.queue.pop_front();
            worker.batch.push(job);
        }
        if !self.ps[p].batch.is_empty() {
            let us = (ms * 1000.0).round().max(1.0) as u64;
            self.ps[p].busy += us;
            self.due.push((self.now + us, Tick::Computed(p)));
        }
    }

    /// P's own evicted blocks go down to its host memory, unless that is kept for D's backups.
    pub(super) fn keep_evicted_p(&mut self, p: usize) {
        let keep = self.options.d2p_trigger == D2pTrigger::Off;
        for event in self.ps[p].ledger.take_events() {
            if let (LedgerEvent::Freed(mut blocks), true) = (event, keep) {
                blocks.reverse();
                self.ps[p].host.insert(blocks);
            }
        }
    }

    /// A P's batch is computed: its turns go on to their D.
    pub fn computed(&mut self, p: usize) {
        let batch = std::mem::take(&mut self.ps[p].batch);
        for &job in &batch {
            self.ps[p].backlog -= self.jobs[job].backlog;
        }
        self.next_batch(p);
        for job in batch {
            match self.jobs[job].plan {
                Some(plan) if self.room_first => {
                    let reuse = self.jobs[job].held / self.block();
                    self.fetch(job, plan, reuse as usize);
                }
                _ => self.enter(job),
            }
        }
    }

    /// Theorem 4 on a restore, in virtual time: what travels and what D computes of the committed prefix.
    pub(super) fn check_theorem_4(&mut self, job: JobId) {
        let j = &self.jobs[job];
        let length = j.input.saturating_sub(j.append);
        let beta = self.options.d2p_staleness_budget_tokens.unwrap_or(0).max(self.block());
        let computed = length.saturating_sub(j.held + j.restored);
        let reseed = Reseed { length, transferred: j.restored.min(length), computed, beta };
        if computed <= beta {
            self.theorem_4.0 += 1;
            self.theorem_4.1 += u64::from(!reseed.holds(&self.cost));
        }
    }

    /// What could be restored on a D behind what it holds of a prompt: from the P with most, or its own host.
    pub fn backup(&self, d: usize, job: JobId) -> Backup {
        let chain = &self.jobs[job].chain;
        let held = self.ds[d].ledger.residency().prefix(chain);
        let tokens = |blocks: usize| blocks as Tokens * self.block();
        if self.ps.is_empty() {
            return Backup { tokens: tokens(self.restorable(None, d, chain, held)), source: None };
        }
        if matches!(self.options.d2p_trigger, D2pTrigger::Off) {
            return Backup::default();
        }
        let each = (0..self.ps.len()).map(|p| (self.restorable(Some(p), d, chain, held), p));
        let best = each.max_by_key(|(blocks, p)| (*blocks, std::cmp::Reverse(*p)));
        let j = &self.jobs[job];
        let behind = |blocks| staleness(j.input.saturating_sub(j.append), tokens(held + blocks));
        let rule = SyncRule::of(&self.options);
        let best = best
            .filter(|(blocks, _)| self.lab.beyond_beta || rule.is_some_and(|r| r.within(behind(*blocks))));
        best.map_or_else(Backup::default, |(blocks, p)| Backup {
            tokens: tokens(blocks),
            source: Some(WorkerId(p as u32)),
        })
    }
}
