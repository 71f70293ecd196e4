package outbox

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/walrelay/walrelay/event"
)

// Archive is a file of rows, each a line with one JSON object, in the order in which they
// were deleted. A name that ends in .zst is one of Zstandard frames, a frame
// for each Append, which its tools read as one file.
//
// A row that was deleted is in it. One that is in it twice was archived by a
// transaction that did not commit, and then again.
type Archive struct {
	file *os.File
	name string
	enc  *zstd.Encoder // nil when it is not compressed
	end  int64         // of what is whole
	buf  []byte
	torn error // an Append that was not undone
}

// OpenArchive opens the file to append to, and makes it when it is missing. What a crash
// has left of an Append at its end is moved to a file beside it, whose name and
// size are returned: its rows were not deleted. A file of another kind is refused.
func OpenArchive(name string) (a *Archive, note string, err error) {
	a = &Archive{name: name}
	if strings.HasSuffix(name, ".zst") {
		if a.enc, err = zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(true)); err != nil {
			return nil, "", fmt.Errorf("archive %s: %w", name, err)
		}
	}
	// Rows may hold what only the relay and the database should see.
	if a.file, err = os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, "", event.Fail(event.Precondition, "name a file that this user may write with --archive", "open archive: %w", err)
	}
	file := a.file
	defer func() {
		if err != nil {
			_ = file.Close() // nothing was written
		}
	}()
	if err := lockFile(a.file); err != nil {
		return nil, "", event.Fail(event.Precondition, "end the other walrelay prune, or name another file", "archive %s is in use: %w", name, err)
	}
	if note, err = a.recover(); err != nil {
		return nil, "", err
	}
	if err := syncFolder(filepath.Dir(name)); err != nil {
		return nil, "", fmt.Errorf("archive %s: %w", name, err)
	}
	return a, note, nil
}

// Append adds rows, and returns when they are on disk. It leaves none of them when it fails.
func (a *Archive) Append(rows [][]byte) error {
	if a.torn != nil {
		return a.torn
	}
	a.buf = a.buf[:0]
	for _, r := range rows {
		a.buf = append(append(a.buf, r...), '\n')
	}
	b := a.buf
	if a.enc != nil {
		b = a.enc.EncodeAll(a.buf, nil)
	}
	_, err := a.file.WriteAt(b, a.end)
	if err == nil {
		err = a.file.Sync()
	}
	if err != nil {
		err = event.Fail(event.Precondition, "is there room on the disk?", "write archive: %w", err)
		if undo := a.file.Truncate(a.end); undo != nil {
			a.torn = err
		}
		return err
	}
	a.end += int64(len(b))
	return nil
}

// Close closes the file.
func (a *Archive) Close() error { return a.file.Close() }

// recover finds the end of what is whole and moves away what is behind it.
func (a *Archive) recover() (note string, err error) {
	info, err := a.file.Stat()
	if err != nil {
		return "", fmt.Errorf("archive %s: %w", a.name, err)
	}
	size := info.Size()
	if !info.Mode().IsRegular() {
		return "", event.Fail(event.Precondition, "name a file", "archive %s is no regular file", a.name)
	}
	if a.enc != nil {
		a.end, err = wholeFrames(a.file, size)
	} else {
		a.end, err = wholeLines(a.file, size)
	}
	if err != nil {
		return "", fmt.Errorf("read archive %s: %w", a.name, err)
	}
	if a.end == size {
		return "", nil
	}
	if a.end == 0 && !a.begins(size) {
		return "", event.Fail(event.Precondition, "name another file", "archive %s holds something else", a.name)
	}
	beside, err := a.moveTail(size)
	if err != nil {
		return "", fmt.Errorf("archive %s: %w", a.name, err)
	}
	return fmt.Sprintf("the last %d bytes of archive %s are of an interrupted write and are moved to %s; their rows were not deleted", size-a.end, a.name, beside), nil
}

// begins reports whether a file without any whole part begins as an archive does.
func (a *Archive) begins(size int64) bool {
	head := make([]byte, min(size, 4))
	if _, err := a.file.ReadAt(head, 0); err != nil {
		return false
	}
	if a.enc == nil {
		return head[0] == '{'
	}
	magic := binary.LittleEndian.AppendUint32(nil, frameMagic)
	return bytes.HasPrefix(magic, head)
}

func (a *Archive) moveTail(size int64) (string, error) {
	for n := 1; ; n++ {
		name := fmt.Sprintf("%s.torn%d", a.name, n)
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			return "", err
		}
		_, err = io.Copy(f, io.NewSectionReader(a.file, a.end, size-a.end))
		if err == nil {
			err = f.Sync()
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return "", err
		}
		return name, a.file.Truncate(a.end)
	}
}

// wholeLines is the end of the last line.
func wholeLines(r io.ReaderAt, size int64) (int64, error) {
	buf := make([]byte, 64<<10)
	for end := size; end > 0; {
		from := max(end-int64(len(buf)), 0)
		part := buf[:end-from]
		if _, err := r.ReadAt(part, from); err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(part, '\n'); i >= 0 {
			return from + int64(i) + 1, nil
		}
		end = from
	}
	return 0, nil
}

const frameMagic = 0xFD2FB528

// wholeFrames is the end of the last frame that is whole: all blocks are there,
// and those of the last frame have the checksum that it says.
func wholeFrames(r io.ReaderAt, size int64) (int64, error) {
	var starts []int64
	end := int64(0)
	for end < size {
		next, ok := frameEnd(r, end, size)
		if !ok {
			break
		}
		starts = append(starts, end)
		end = next
	}
	if len(starts) == 0 {
		return 0, nil
	}
	// After a loss of power the last one may have its length and not its bytes.
	last := starts[len(starts)-1]
	dec, err := zstd.NewReader(bufio.NewReader(io.NewSectionReader(r, last, end-last)), zstd.WithDecoderConcurrency(1))
	if err != nil {
		return 0, err
	}
	defer dec.Close()
	if _, err := io.Copy(io.Discard, dec); err != nil {
		return last, nil //nolint:nilerr // that is what was asked
	}
	return end, nil
}

// frameEnd walks over the headers of a frame (RFC 8878, section 3.1.1).
func frameEnd(r io.ReaderAt, at, size int64) (int64, bool) {
	read := func(n int64) []byte {
		b := make([]byte, n)
		if at+n > size {
			return nil
		}
		if _, err := r.ReadAt(b, at); err != nil {
			return nil
		}
		at += n
		return b
	}
	head := read(5)
	if head == nil || binary.LittleEndian.Uint32(head) != frameMagic {
		return 0, false
	}
	descriptor := head[4]
	single := descriptor&0x20 != 0
	rest := []int64{0, 1, 2, 4}[descriptor&3] + []int64{0, 2, 4, 8}[descriptor>>6]
	if single && descriptor>>6 == 0 {
		rest++ // of the content size
	}
	if !single {
		rest++ // the window
	}
	if read(rest) == nil {
		return 0, false
	}
	for last := false; !last; {
		b := read(3)
		if b == nil {
			return 0, false
		}
		header := uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16
		last = header&1 != 0
		n := int64(header >> 3)
		if header>>1&3 == 1 { // one byte, many times
			n = 1
		}
		if at += n; at > size {
			return 0, false
		}
	}
	if descriptor&4 != 0 && read(4) == nil {
		return 0, false
	}
	return at, true
}

// OIDs of types whose text form is nearly that of JSON, from pg_type.dat.
const (
	typeBool    = 16
	typeFloat4  = 700
	typeFloat8  = 701
	typeNumeric = 1700
)

// appendRow appends a row as a JSON object: json and jsonb as they are, but for white space
// between their tokens; numbers and booleans as such; bytea in base64; all else as a string.
func appendRow(b []byte, cols []Column, values [][]byte) []byte {
	b = append(b, '{')
	for i, c := range cols {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, []byte(c.Name))
		b = append(b, ':')
		b = appendValue(b, c.text, values[i])
	}
	return append(b, '}')
}

func appendValue(b []byte, oid uint32, v []byte) []byte {
	if v == nil {
		return append(b, "null"...)
	}
	switch oid {
	case event.TypeJSON, event.TypeJSONB:
		var one bytes.Buffer // on one line
		if json.Compact(&one, v) == nil {
			return append(b, one.Bytes()...)
		}
	case event.TypeBytea:
		if raw, ok := appendBytea(nil, v); ok {
			b = append(b, '"')
			b = base64.StdEncoding.AppendEncode(b, raw)
			return append(b, '"')
		}
	case typeBool:
		return append(b, map[string]string{"t": "true", "f": "false"}[string(v)]...)
	case event.TypeInt8, event.TypeInt2, event.TypeInt4, typeFloat4, typeFloat8, typeNumeric:
		if json.Valid(v) { // NaN is none
			return append(b, v...)
		}
	}
	return appendString(b, v)
}

func appendString(b, s []byte) []byte {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(string(s)) // a string, to memory
	return append(b, bytes.TrimSuffix(text.Bytes(), []byte("\n"))...)
}
