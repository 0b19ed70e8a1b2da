"""Statements of the structured programs.

In a template ``{i}`` and the like are expressions (`python_expressions`), ``{e}`` what can be raised, ``{E}`` what is caught, ``{R}`` what is returned,
``{=i}`` a variable that may be assigned, ``$a`` a new name.  On a line of its own ``{B}`` is a block there, ``{L}`` one of a loop,
``{F n x}`` one of a new function that has these variables, ``{Y n x}`` one of a generator.
"""

from __future__ import annotations

SIMPLE = (
    "r.append({v})", "r.append({i})", "r.append({t})", "r.append({l})", "r.append(({s}, {i}))", "r.append({d})", "{=i} = {i}", "{=t} = {t}", "{=s} = {s}", "{=l} = {l}",
    "{=d} = {d}", "{=i} += {i}", "{=t} = {=t} * {i}", "{=t} += {t}", "{=l}.append({i})", "{=l} += [{i}]", "{=d}['a'] = {i}", "{=d}[{s}] = {i}", "{=i} -= len(r)",
    "{=i}, {=l}[0:1] = {i}, [{i}]", "{=i}, *{=l} = [{i}, *{l}]", "*{=l}, {=i} = (*{l}, {i})", "({=i}, ({=s}, {=i})) = {i}, ({s}, {i})", "{=l}[1:2] = {l}[:3]", "del {=l}[:1]",
    "del {=l}[::2]", "{=d}.pop('a', None)", "{=d}.update(a={i}, e={i})", "{=d}.setdefault('f', {i})", "del {=d}['a']", "{=l}.sort(key=lambda q: (q % 3, -q))", "{=l}.reverse()",
    "{=l}.insert({i}, {i})", "{=l}.extend(q for q in {l}[:3] if q != {i})", "{=i} = {=l}.pop()", "{=i}, {=i} = {i}, {i}", "{=l} = $q = [{i}]\n$q.append({i})", "r.append([r is r, {l} is {l}])",
    "raise {e}", "raise {e} from {e}", "raise {e} from None", "assert {b}, {s}", "assert {i}, ({i}, {s})", "r.append(f'{{{I}=}} {{{Q}!r:>6}} {{{I}:+d}}')",
    "$q = [(q % 2, c) for q, c in zip({l}, {s})]\nr.append(sorted($q, key=operator.itemgetter(0)))", "r.append({i} if {i} < {i} != {i} else {s})",
    "r.append([p for p in {l} if p in {l} and not p % 2 or p > {i}])", "r.append({{p: [q for q in {l} if q < p] for p in {l}}})", "r.append([($w := p + {i}) for p in {l} if p] + [{i}])",
    "$q = iter({l})\nr.append(list(zip($q, $q)))", "$q = (p * {i} for p in {l})\nr.append(next($q, None))\nr.append(list($q))", "$p = $q = {l}\n$p += [{i}]\nr.append(($p is $q, $q))",
    "r.append([*{l}, *{d}, *{s}])", "r.append({{**{d}, 'q': {t}}})", "$q = [[]] * 2\n$q[0].append({i})\nr.append($q)", "$q = lambda a, *b, c={i}, **e: (a, b, c, e)\nr.append($q(*{l}, **{d}))",
    "$q = bytearray(b'abc')\n$q[0] = {i} & 255\nr.append(bytes($q))", "set_g({i})", "H.append({i})", "r.append((G, len(H)))", "r.append({t}.sum() * {i})",
    "r.append(sorted({l}, key=functools.cmp_to_key(lambda a, b: b - a)))", "r.append(list(map(lambda a, b: a * b, {l}, {l})))", "$q = functools.partial(lambda a, b, c=1: (a, b, c), {i})\nr.append($q({s}, c={t}))",
    "$q = {{1, 2}}\n$q.add({i})\n$q ^= {{2}}\nr.append($q)", "$q = collections.defaultdict(list)\nfor p in {l}: $q[p % 2].append(p)\nr.append($q)", "$q = collections.OrderedDict(b={i}, a={t})\n$q.move_to_end('b')\nr.append($q)",
    "$q = collections.deque({l}, 3)\n$q.appendleft({i})\n$q.rotate(1)\nr.append($q)", "$q = collections.ChainMap({{'a': {i}}}, {d})\n$q['z'] = 1\nr.append(sorted($q.items()))", "r.append(divmod({i}, {i}))",
    "r.append({l}[{i}:{i}:2])", "r.append({s}.join(['p', {s}]))", "r.append({i}.__add__({i}))", "r.append({b})", "o.v = {v}", "o.n += {i}", "r.append(o.v)", "del o.v", "o.items.append({v})",
    "r.append(hasattr(o, 'v') and o.n)", "o.items[:] = [o.n, {t}]", "r.append(getattr(o, 'z', {i}))", "setattr(o, 'z', {i})", "r.append(o)", "o = Box({i}, {t})", "r.append(vars(o).keys() >= {{'n'}})",
    "r.append(operator.attrgetter('n')(o))", "r.append(operator.methodcaller('bump', {i})(o))", "r.append(o.bump({i}))", "r.append((lambda: (yield {i}))().send(None))", "{=i} = {=i} if {b} else {i}",
    "r.append(list(itertools.zip_longest({l}, {s}, fillvalue={i})))", "r.append(list(itertools.pairwise({l})))", "r.append(list(itertools.combinations({l}, 2)))", "r.append([a + b for a in {l} for b in [a * 2] if a])",
    "print({s}, end='')", "r.append(any((w := q) > {i} for q in {l}) and w)", "r.append([(lambda: p)() for p in {l}])", "r.append([f() for f in [lambda: p for p in {l}]])", "{=i} = {=i} and {i} or {i}",
)  # fmt: skip
COMPOUND = (
    "if {b}:\n    {B}", "if {b}:\n    {B}\nelse:\n    {B}", "if {b}:\n    {B}\nelif {i}:\n    {B}\nelse:\n    {B}", "if ($w := {i}) > 1:\n    r.append($w)\n    {B}",
    "for {=i} in {l}[:4]:\n    {L}", "for {=i} in range({i} % 4):\n    {L}\nelse:\n    {B}", "for $a, {=i} in enumerate({l}[:3]):\n    r.append($a)\n    {L}", "for {=i}, {=s} in zip({l}, {s}):\n    {L}",
    "for $a, {=i} in sorted({d}.items()):\n    {L}", "for {=t} in [{t}, {t}]:\n    {L}", "for {=i} in list({l})[:3]:\n    if {b}:\n        continue\n    {L}\nelse:\n    {B}",
    "$it = iter(range(3))\nwhile next($it, None) is not None:\n    {L}", "$it = iter({l}[:3])\nwhile ($w := next($it, None)) is not None:\n    r.append($w)\n    {L}\nelse:\n    {B}",
    "for $a, $q in zip(range(6), {=l}):\n    {=l}.append($q)\n    {L}", "for {=i} in reversed({l}[:3]):\n    {L}", "for $q in list({d}):\n    {=d}.pop($q, None)\n    {L}",
    "try:\n    {B}\nexcept {E} as $e:\n    r.append((type($e).__name__, $e.args))\n    {B}", "try:\n    {B}\nexcept {E}:\n    {B}\nelse:\n    {B}\nfinally:\n    {B}", "try:\n    {B}\nfinally:\n    {B}",
    "try:\n    {B}\n    raise {e}\nexcept {E} as $e:\n    r.append($e)\n    {B}\nexcept {E}:\n    {B}\nfinally:\n    r.append({i})", "try:\n    {B}\nexcept {E} as $e:\n    $e.add_note({s})\n    raise",
    "try:\n    {B}\n    {=i} //= 0\nexcept {E} as $e:\n    raise {e} from $e", "try:\n    try:\n        {B}\n        raise {e}\n    finally:\n        {B}\nexcept Exception as $e:\n    r.append((type($e).__name__, str($e), type($e.__context__).__name__, type($e.__cause__).__name__))",
    "try:\n    try:\n        raise {e}\n    except {E}:\n        {B}\n        raise {e}\nexcept Exception as $e:\n    r.append((repr($e), repr($e.__context__), repr($e.__cause__), $e.__suppress_context__))",
    "try:\n    {B}\nexcept* {E} as $e:\n    r.append(len($e.exceptions))\n    r.append({i})", "try:\n    raise ExceptionGroup({s}, [ValueError({i}), Own({i})])\nexcept* ValueError as $e:\n    r.append($e.exceptions)\nexcept* Own:\n    r.append({i})",
    "with Ctx({s}) as $c:\n    r.append($c.name)\n    {B}", "with Ctx('a'), Ctx({s}, True):\n    {B}", "with Ctx('a', {b}) as $c:\n    {B}\n    raise {e}", "with contextlib.suppress({E}):\n    {B}\n    raise {e}", "with managed({i}) as {=i}:\n    {B}",
    "with managed({i}), Ctx({s}, True):\n    {B}\n    raise {e}", "with contextlib.ExitStack() as $q:\n    $q.callback(r.append, {i})\n    $q.enter_context(Ctx({s}))\n    {B}\n    $q.enter_context(managed({i}))",
    "with contextlib.ExitStack() as $q:\n    $q.push(lambda *e: r.append(e[0] and e[0].__name__) or {b})\n    {B}\n    raise {e}", "with swallowing({E}):\n    {B}\n    raise {e}", "with contextlib.nullcontext({i}) as {=i}:\n    {B}", "with contextlib.closing(Closing()) as $c:\n    {B}",
    "match {v}:\n    case 0 | 1:\n        {B}\n    case int($q) if $q > {i}:\n        r.append($q)\n    case [$a, *$b]:\n        r.append(($a, $b))\n        {B}\n    case {{'a': $a, **$b}}:\n        r.append(($a, $b))\n    case str():\n        {B}\n    case _:\n        r.append('other')",
    "match ({i}, {l}):\n    case (0, _):\n        {B}\n    case ($a, [$b]) | ($a, [_, $b, *_]):\n        r.append(($a, $b))\n    case ($a, []) as $b:\n        r.append($b)", "match o:\n    case Box(n=0):\n        {B}\n    case Box(2, $q) if {b}:\n        r.append($q)\n    case Box(n=$q):\n        r.append($q)\n        {B}",
    "def $f(n, x, *l, s={s}, **d):\n    {F n x s d}\n    return {i}\nr.append($f({i}, {t}, *{l}, s={s}, **{d}))", "def $f(n, x):\n    nonlocal k\n    {F n k x}\n    return (n, x)\n{=i}, {=t} = $f({i}, {t})", "def $f(q, n):\n    if q <= 0:\n        return n\n    {F n}\n    return $f(q - 1, n)\nr.append($f({i} % 4, {i}))",
    "def $g(n, l):\n    {Y n l}\nr.append(list($g({i}, {l}))[:20])", "def $g(n):\n    {Y n}\n$h = $g({i})\nr.append(next($h, 'end'))\n{B}\nr.append(list($h)[:9])",
    "def $g(n, x):\n    try:\n        {Y n x}\n        yield x\n    finally:\n        r.append(('fin', n))\nfor $q in $g({i}, {t}):\n    r.append($q)\n    {L}", "def $g(n):\n    for _ in range(9):\n        try:\n            n = (yield n) or n\n        except {E} as e:\n            r.append(repr(e))\n            n += 1\n        {F n}\n$h = $g({i})\nr.append(next($h))\nr.append($h.send({i}))\nr.append($h.throw({e}))\n{B}\n$h.close()",
    "def $i(n):\n    {Y n}\n    return n\ndef $g(n):\n    v = yield from $i(n)\n    r.append(('got', v))\n    {Y n}\nr.append(list($g({i}))[:20])",
    "def $g(n):\n    try:\n        yield n\n        {Y n}\n        yield n + 1\n    except GeneratorExit:\n        r.append('closed')\n        raise\n$h = $g({i})\nr.append(next($h))\n{B}\n$h.close()\nr.append(next($h, 'over'))", "def $g(n):\n    {Y n}\nr.append(sorted(map(str, itertools.islice($g({i}), 5))))\nr.append(dict(zip('abc', $g({i}))))\n{B}",
    "def $f(n, acc=[]):\n    acc.append(n)\n    {F n}\n    return acc\nr.append($f({i}))\n{B}\nr.append($f({i}))", "def $f():\n    $q = 0\n    def up(n={i}):\n        nonlocal $q\n        $q += n\n        {F n}\n        return $q\n    return up\n$h = $f()\nr.append(($h(), $h({i})))\n{B}\nr.append($h())",
    "@traced({s})\ndef $f(n, *, k=1):\n    {F n k}\n    return n + k\nr.append(($f({i}, k={i}), $f.__name__))", "@counted\ndef $f(n):\n    {F n}\n    return n\nr.append($f({i}))\n{B}\nr.append(($f({i}), $f.calls))",
    "@functools.lru_cache(maxsize=None)\ndef $f(n):\n    r.append(n)\n    return n * 2\nr.append([$f(q) for q in {l} + {l}])", "class $C:\n    k = {i}\n    def __init__(self, v):\n        self.v = v\n        {F self.v}\n    def m(self, n):\n        {F n self.v}\n        return self.v + n * self.k\n$o = $C({i})\nr.append($o.m({i}))\n{B}\n$C.k = {i}\nr.append(($o.m(1), $o.v))",
    "$fs = []\nfor $q in {l}[:3]:\n    {L}\n    $fs.append(lambda n=0: ($q, n))\nr.append([f({i}) for f in $fs])", "$h = [lambda n: n + {i}, lambda n: {i}]\nr.append([f({i}) for f in $h])\n{B}",
    "for {=i} in range(4):\n    try:\n        if {=i} > 2:\n            break\n        {S}\n    finally:\n        r.append({=i})",
)  # fmt: skip
OF_LOOPS = ("break", "continue", "if {b}:\n    break", "if {b}:\n    {B}\n    continue")
OF_GENERATORS = (
    "yield {v}", "r.append((yield {i}))", "yield from {l}[:3]", "yield {i}, {t}", "{=i} = yield {i}\n{=i} = {=i} or 0", "return {v}", "yield from (q * 2 for q in {l}[:3])",
    "try:\n    yield {i}\n    {B}\nfinally:\n    r.append('y')", "for $q in {l}[:2]:\n    yield $q\n    {L}", "with Ctx({s}):\n    yield {v}\n    {B}", "try:\n    yield {i}\nexcept {E} as $e:\n    r.append(repr($e))\n    yield {i}", "r.append((yield from iter({l}[:2])))",
)  # fmt: skip
