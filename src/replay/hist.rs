//! A weighted histogram of durations with bins 1 % wide, and exact percentiles of short lists.

/// Bins 1 % wide from 1 µs.
#[derive(Debug, Clone, Default)]
pub struct Hist {
    bins: Vec<u64>,
    total: u64,
}

/// ln 1.01.
const WIDTH: f64 = 0.009_950_330_853_168_083;

impl Hist {
    /// Adds `weight` at `us`.
    pub fn add(&mut self, us: u64, weight: u64) {
        let bin = ((us.max(1) as f64).ln() / WIDTH) as usize;
        if bin >= self.bins.len() {
            self.bins.resize(bin + 1, 0);
        }
        self.bins[bin] += weight;
        self.total += weight;
    }

    /// Adds another histogram.
    pub fn merge(&mut self, other: &Self) {
        if other.bins.len() > self.bins.len() {
            self.bins.resize(other.bins.len(), 0);
        }
        self.bins.iter_mut().zip(&other.bins).for_each(|(a, b)| *a += b);
        self.total += other.total;
    }

    /// The value below which the share `q` of the weight lies, in µs; `None` when empty.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let goal = (self.total as f64 * q).ceil().max(1.0) as u64;
        let mut seen = 0;
        let bin = self.bins.iter().position(|w| {
            seen += w;
            seen >= goal
        })?;
        Some(((bin as f64 + 0.5) * WIDTH).exp())
    }
}

/// Nearest-rank percentile of a sorted list; 0 when empty.
pub fn percentile(sorted: &[u64], q: f64) -> u64 {
    let rank = (sorted.len() as f64 * q).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_percent() {
        let mut h = Hist::default();
        assert_eq!(h.quantile(0.5), None);
        (1..=1000u64).for_each(|us| h.add(us * 10, 1));
        for (q, want) in [(0.5, 5000.0), (0.99, 9900.0)] {
            assert!((h.quantile(q).unwrap() / want - 1.0).abs() < 0.011);
        }
        let mut both = Hist::default();
        both.add(1_000_000, 3000);
        both.merge(&h);
        assert!(both.quantile(0.5).unwrap() > 990_000.0);
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let list: Vec<u64> = (1..=100).collect();
        assert_eq!((percentile(&list, 0.5), percentile(&list, 0.99), percentile(&list, 1.0)), (50, 99, 100));
        assert_eq!((percentile(&[], 0.5), percentile(&[7], 0.01)), (0, 7));
    }
}
