//! Figures of several runs.

use std::fmt;

/// A figure that was measured several times: the median counts, and the range tells how far it can be trusted.
#[derive(Clone, Debug, Default)]
pub struct Sample(Vec<f64>);

impl Sample {
    pub fn push(&mut self, figure: f64) {
        self.0.push(figure);
        self.0.sort_by(f64::total_cmp);
    }

    /// Nothing when there is no figure.
    pub fn median(&self) -> Option<f64> {
        let middle = self.0.len() / 2;
        match self.0.len() % 2 {
            1 => self.0.get(middle).copied(),
            _ => Some((self.0.get(middle.checked_sub(1)?)? + self.0.get(middle)?) / 2.0),
        }
    }
}

impl FromIterator<f64> for Sample {
    fn from_iter<T: IntoIterator<Item = f64>>(figures: T) -> Self {
        let mut sample = Self::default();
        figures.into_iter().for_each(|figure| sample.push(figure));
        sample
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(median), Some(least), Some(most)) = (self.median(), self.0.first(), self.0.last()) else {
            return f.write_str("not measured");
        };
        write!(f, "{}", readable(median))?;
        if self.0.len() > 1 { write!(f, " ({} to {})", readable(*least), readable(*most)) } else { Ok(()) }
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
