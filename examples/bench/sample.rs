//! Figures of several runs.

use std::fmt;

/// A figure that was measured several times, in that order: the median counts, and the range tells how far it can be
/// trusted.
#[derive(Clone, Debug, Default)]
pub struct Sample(Vec<f64>);

impl Sample {
    pub fn push(&mut self, figure: f64) {
        self.0.push(figure);
    }

    /// Each as a multiple of what was measured beside it: a machine that is slow for some minutes is so to both.
    pub fn against(&self, beside: &Self) -> Self {
        self.0.iter().zip(&beside.0).map(|(figure, other)| figure / other).collect()
    }

    /// Nothing when there is no figure.
    pub fn median(&self) -> Option<f64> {
        let sorted = self.sorted();
        let middle = sorted.len() / 2;
        match sorted.len() % 2 {
            1 => sorted.get(middle).copied(),
            _ => Some((sorted.get(middle.checked_sub(1)?)? + sorted.get(middle)?) / 2.0),
        }
    }

    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }
}

impl FromIterator<f64> for Sample {
    fn from_iter<T: IntoIterator<Item = f64>>(figures: T) -> Self {
        Self(figures.into_iter().collect())
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sorted = self.sorted();
        let (Some(median), Some(least), Some(most)) = (self.median(), sorted.first(), sorted.last()) else {
            return f.write_str("not measured");
        };
        write!(f, "{}", readable(median))?;
        if sorted.len() > 1 { write!(f, " ({} to {})", readable(*least), readable(*most)) } else { Ok(()) }
    }
}

/// A number with three digits that count, or with its thousands set apart.
pub fn readable(number: f64) -> String {
    match number {
        ..10.0 => format!("{number:.2}"),
        ..100.0 => format!("{number:.1}"),
        _ => {
            let digits = format!("{number:.0}");
            let mut text = String::new();
            for (position, digit) in digits.chars().enumerate() {
                if position > 0 && (digits.len() - position).is_multiple_of(3) {
                    text.push(',');
                }
                text.push(digit);
            }
            text
        }
    }
}
