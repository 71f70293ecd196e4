package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of the times in /proc/<pid>/stat, USER_HZ on Linux.
const tick = 10 * time.Millisecond

// cpuOf is the processor time, user and system, of a process's live threads.
// schedstat counts nanoseconds where stat counts ticks of 10 ms.
func cpuOf(pid int) time.Duration {
	var sum time.Duration
	files, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/schedstat")
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // the thread has ended
		}
		if f := strings.Fields(string(b)); len(f) > 0 {
			ns, _ := strconv.ParseInt(f[0], 10, 64)
			sum += time.Duration(ns)
		}
	}
	return sum
}

// cpuOfTree adds the live children and those that were waited for: a postmaster and its backends.
func cpuOfTree(pid int) time.Duration {
	sum := cpuOf(pid)
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range files {
		f := statFields(name)
		if len(f) < 15 {
			continue
		}
		switch id := filepath.Base(filepath.Dir(name)); {
		case id == strconv.Itoa(pid):
			for _, v := range f[13:15] { // cutime, cstime
				n, _ := strconv.ParseInt(v, 10, 64)
				sum += time.Duration(n) * tick
			}
		case f[1] == strconv.Itoa(pid):
			child, _ := strconv.Atoi(id)
			sum += cpuOf(child)
		}
	}
	return sum
}

// statFields are the fields of proc(5)'s stat from the state on, which is the third.
func statFields(name string) []string {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil
	}
	s := string(b)
	return strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
}

// busy is the processor time that all processes have used, without interrupts.
func busy() time.Duration {
	b, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(b), "\n")
	f := strings.Fields(line)
	if len(f) < 9 {
		return 0
	}
	var sum time.Duration
	for _, i := range []int{1, 2, 3, 8} { // user, nice, system, steal
		n, _ := strconv.ParseInt(f[i], 10, 64)
		sum += time.Duration(n) * tick
	}
	return sum
}

// memory is what a process holds, in bytes.
type memory struct {
	Peak int64 `json:"peak"` // of the resident memory so far
	RSS  int64 `json:"rss"`
	Anon int64 `json:"anonymous"` // of RSS: heap and stacks; the rest is the program file
}

func memoryOf(pid int) memory {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return memory{}
	}
	var m memory
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(line, ":")
		kb, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		switch name {
		case "VmHWM":
			m.Peak = kb << 10
		case "VmRSS":
			m.RSS = kb << 10
		case "RssAnon":
			m.Anon = kb << 10
		}
	}
	return m
}

// procLine is the value of the first line of a file in /proc that begins with name.
func procLine(file, name string) string {
	b, _ := os.ReadFile(file)
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// load is the load average of the last minute.
func load() string {
	b, _ := os.ReadFile("/proc/loadavg")
	avg, _, _ := strings.Cut(string(b), " ")
	return avg
}
