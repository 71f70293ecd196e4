package metrics
import ("testing";"time";"math";"math/rand/v2";"syscall";"runtime";"github.com/prometheus/client_golang/prometheus")
func cpu() time.Duration { var r syscall.Rusage; syscall.Getrusage(1, &r); return time.Duration(r.Utime.Nano()+r.Stime.Nano()) }
func TestDbg(t *testing.T){
	runtime.LockOSThread()
	m := &meter{failures: zeroes(nil)}
	rng := rand.New(rand.NewPCG(1, 2))
	ages := make([]time.Duration, 4096)
	for i := range ages { ages[i] = time.Duration(100e3 * math.Exp2(rng.NormFloat64())) }
	const N=10_000_000
	for _,batch := range []int{1,16,256} {
	best := time.Hour
	for range 5 {
	c:=cpu()
	for i:=0;i<N/5;i++ { m.Acked(1, ages[i&4095], ages[(i+7)&4095]); if i%batch==0 {m.Rest()} }
	best=min(best,cpu()-c)
	}
	t.Logf("batch %d: %v/event", batch, best/(N/5))
	}
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "h", Buckets: prometheus.ExponentialBuckets(1e-4, 2, 22), NativeHistogramBucketFactor: 1.1})
	c:=cpu()
	for i:=0;i<N/10;i++ { h.Observe(1.2e-4); h.Observe(ages[i&4095].Seconds()) }
	t.Logf("library: %v/event", (cpu()-c)/(N/10))
	c=cpu(); x:=0; for i:=0;i<N;i++ { x+=native(ages[i&4095]) }
	t.Logf("native: %v %d", (cpu()-c)/N,x)
	c=cpu(); for i:=0;i<N/10;i++ { _ = time.Now() }
	t.Logf("now: %v", (cpu()-c)/(N/10))
}
