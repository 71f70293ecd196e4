package slotmgr

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// shard is what a publication has of a table whose rows are divided by a hash.
type shard struct {
	hash     string // the call
	of, this int
}

// shardFilter is how pg_get_expr writes the filters that `walrelay init --shards` makes.
var shardFilter = regexp.MustCompile(`^\(\(\(COALESCE\((\w+\(.+, \(0\)::bigint\)), \(0\)::bigint\) & '9223372036854775807'::bigint\) % \((\d+)\)::bigint\) = (\d+)\)$`)

func parseShard(filter string) (s shard, ok bool) {
	m := shardFilter.FindStringSubmatch(filter)
	if m == nil {
		return s, false
	}
	of, err := strconv.Atoi(m[2])
	this, err2 := strconv.Atoi(m[3])
	return shard{m[1], of, this}, err == nil && err2 == nil && this < of
}

// sharded finds whether the shards of a table are all published: the rows of one
// that is not are sent to nobody. Whether a relay reads each cannot be seen, since slots do not know their publications.
func (p *preflight) sharded(t Table, publication string, s shard) {
	var quals []string
	if !p.ask(`
select array_agg(pg_get_expr(r.prqual, r.prrelid))
from pg_publication p join pg_publication_rel r on r.prpubid = p.oid join pg_class c on c.oid = r.prrelid join pg_namespace n on n.oid = c.relnamespace
where p.pubinsert and r.prqual is not null and n.nspname = $1 and c.relname = $2`, []any{t.Schema, t.Name}, &quals) {
		return
	}
	there := map[int]bool{}
	for _, q := range quals {
		if other, ok := parseShard(q); ok && other.hash == s.hash && other.of == s.of {
			there[other.this] = true
		}
	}
	var missing []string
	for i := range s.of {
		if !there[i] {
			missing = append(missing, strconv.Itoa(i))
		}
	}
	f := Finding{Name: "shard", Detail: fmt.Sprintf("publication %q has shard %d of 0 to %d of %s, and the others are published, too", publication, s.this, s.of-1, t)}
	if len(missing) > 0 {
		base := strings.TrimSuffix(publication, "_"+strconv.Itoa(s.this))
		f.Level = FAIL
		f.Detail = fmt.Sprintf("publication %q has shard %d of 0 to %d of %s, and no publication has shard %s: rows of it are sent to nobody", publication, s.this, s.of-1, t, strings.Join(missing, ", "))
		f.Remedy = fmt.Sprintf("walrelay init --apply --publication %s --shards %d; then walrelay slot recover for the slot of each that was missing", base, s.of)
	}
	p.add(f)
}
