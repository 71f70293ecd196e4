package config

// Nearest returns the name that word is most likely a slip of, or "".
func Nearest(word string, names []string) string {
	best, bestDist := "", max(2, len(word)/3)+1
	if len(word) < 4 {
		bestDist = 2
	}
	for _, n := range names {
		if d := distance(word, n); d < bestDist {
			best, bestDist = n, d
		}
	}
	return best
}

// distance counts the edits between a and b, a swap of neighbours as one.
func distance(a, b string) int {
	prev2 := make([]int, len(b)+1)
	prev := make([]int, len(b)+1)
	cur := make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], prev2[j-2]+1)
			}
		}
		prev2, prev, cur = prev, cur, prev2
	}
	return prev[len(b)]
}
